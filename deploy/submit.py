"""Run a command of brevis as a job of a Ray cluster, follow its log, and end with the exit code of the command.

``ray job submit`` itself ends with 0 where a job was stopped, and with 1 whatever a command failed with.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

STOPPED = 143
ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str]) -> int:
    """Submit, follow, and return the exit code."""
    client = JobSubmissionClient(os.environ["RAY_API_SERVER_ADDRESS"])
    runtime_env = yaml.safe_load((ROOT / "deploy" / "runtime_env.yaml").read_text("utf-8"))
    job = client.submit_job(
        entrypoint=shlex.join(["python", "-m", "pipeline", *arguments, "--ray"]),
        runtime_env={**runtime_env, "working_dir": str(ROOT)},
    )
    print(f"job {job}; `ray job stop {job}` stops it", file=sys.stderr, flush=True)
    try:
        asyncio.run(_follow(client, job))
    except RuntimeError as error:  # the job goes on where its log cannot be read any more
        print(f"the log of {job} ends here: {error}", file=sys.stderr)
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(1)
    print(f"job {job}: {info.status}, exit code {info.driver_exit_code}", file=sys.stderr)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    if info.status == JobStatus.STOPPED:
        return STOPPED
    return int(info.driver_exit_code or 1)


async def _follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        sys.stdout.write(lines)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
