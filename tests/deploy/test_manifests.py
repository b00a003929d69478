"""What deploy/ hands to Kubernetes, to the object store and to Grafana says what it means."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from configs.loader import parse_bytes
from configs.recipe import load
from pipeline.cli import parser
from pipeline.meters import METERS
from pipeline.store_s3 import S3Store
from tests.bench.ours import recipes
from tests.cases import bf16, safetensors
from tests.faultproxy import fault_proxy
from tests.processes import ROOT, brevis
from tests.s3server import S3Server, s3_server

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSION = kubernetes_validate.latest_version()

# -- Kubernetes -----------------------------------------------------------------------------------

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
POD = {"type": "object"}  # is checked by the schemas of Kubernetes itself
GROUP = {"rayStartParams": TEXTS, "template": POD}
CLUSTER: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["headGroupSpec"],
    "properties": {
        "rayVersion": {"type": "string"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "idleTimeoutSeconds": COUNT,
                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                "resources": {"type": "object"},
                "securityContext": {"type": "object"},
            },
        },
        "headGroupSpec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["rayStartParams", "template"],
            "properties": {**GROUP, "serviceType": {"type": "string"}},
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                "properties": {
                    **GROUP,
                    "groupName": {"type": "string"},
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas", "numOfHosts"), COUNT),
                },
            },
        },
    },
}
"""The fields of the API ``ray.io/v1`` that we use, and no others; KubeRay drops, or refuses, what it does not know."""
JOB: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["entrypoint", "rayClusterSpec"],
    "properties": {
        "entrypoint": {"type": "string"},
        "runtimeEnvYAML": {"type": "string"},
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        "shutdownAfterJobFinishes": {"type": "boolean"},
        **dict.fromkeys(("backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"), COUNT),
        "rayClusterSpec": CLUSTER,
    },
}


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def validate(manifest: dict[str, Any]) -> None:
    """Check a manifest against the schema of its kind, and the pods inside it against that of pods."""
    if manifest["apiVersion"] == "ray.io/v1":
        jsonschema.validate(manifest["spec"], {"RayCluster": CLUSTER, "RayJob": JOB}[manifest["kind"]])
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    for template in pods(manifest):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, VERSION, strict=True)


def pods(found: Any) -> Iterator[dict[str, Any]]:
    """Yield every template of a pod inside a manifest."""
    if isinstance(found, dict):
        if "containers" in found.get("spec", {}):
            yield found
        for value in found.values():
            yield from pods(value)
    elif isinstance(found, list):
        for value in found:
            yield from pods(value)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path) -> None:
    for manifest in documents(path):
        validate(manifest)


def test_the_three_kinds_are_there() -> None:
    kinds = {manifest["kind"] for path in MANIFESTS for manifest in documents(path)}
    assert {"RayCluster", "RayJob", "CronJob"} <= kinds


@pytest.mark.parametrize("kind", ["RayCluster", "RayJob", "CronJob"])
def test_the_check_sees_a_wrong_word(kind: str) -> None:
    (manifest,) = [one for path in MANIFESTS for one in documents(path) if one["kind"] == kind]
    for at in (manifest["spec"], next(pods(manifest))["spec"], next(pods(manifest))["spec"]["containers"][0]):
        at["replica"] = 3
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(manifest)
        del at["replica"]
    validate(manifest)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_have_no_rights_and_write_to_their_own_folders_alone(path: Path) -> None:
    for template in pods(documents(path)):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert all("emptyDir" in volume for volume in mounts.values())
            assert "/tmp" in mounts  # Ray keeps its session there, and workers their packs


def test_the_object_store_is_small_and_fits_its_memory() -> None:
    """Y08 of the field cases: what does not fit `/dev/shm` would go to a disk, slowly, or be refused."""
    for path in MANIFESTS:
        sizes = re.findall(r'object-store-memory: "(\d+)"', path.read_text())
        shared = [
            volume["emptyDir"]["sizeLimit"]
            for manifest in documents(path)
            for pod in pods(manifest)
            for volume in pod["spec"]["volumes"]
            if volume["name"] == "shm"
        ]
        assert len(sizes) == len(shared)
        assert all(int(size) <= parse_bytes(f"{limit}B") for size, limit in zip(sizes, shared, strict=True))
    [said] = re.findall(r"--shm-size=(\w+)", (DEPLOY / "README.md").read_text())
    started = re.findall(r"--object-store-memory=(\d+)", (DEPLOY / "README.md").read_text())
    assert {int(size) for size in started} == {200_000_000}
    assert parse_bytes(f"{said[:-1]}MiB") > 200_000_000


def commands() -> list[list[str]]:
    """Every command of brevis in the manifests, with its options."""
    found = []
    for manifest in (one for path in MANIFESTS for one in documents(path)):
        texts = [manifest["spec"].get("entrypoint", "")] if manifest["kind"] == "RayJob" else []
        texts += [line for pod in pods(manifest) for one in pod["spec"]["containers"] for line in one.get("args", [])]
        for text in texts:
            found += [shlex.split(line) for line in re.findall(r"brevis .*", text)]
    return found


def test_commands_are_such_that_brevis_takes() -> None:
    assert {words[1] for words in commands()} == {"archive", "verify"}
    for words in commands():
        arguments = parser().parse_args(words[1:])
        load(arguments.config)


@pytest.mark.parametrize(("submitted", "state", "code"), [(0, "succeeded", 0), (0, "was stopped", 1), (1, "failed", 1)])
def test_a_night_is_as_good_as_the_state_of_its_jobs(submitted: int, state: str, code: int, tmp_path: Path) -> None:
    """`ray job submit` ends with 0 where a job was stopped; every step is tried whatever became of the others."""
    [manifest] = documents(DEPLOY / "kubernetes" / "nightly.yaml")
    [pod] = pods(manifest)
    [container] = pod["spec"]["containers"]
    ray, log = tmp_path / "ray", tmp_path / "log"
    answer = f"case $2 in status) echo \"Job 'x' {state}\";; *) exit {submitted};; esac"
    ray.write_text(f"#!/bin/sh\necho $* >> {log}\n{answer}\n")
    ray.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "pod-1"}
    env |= {one["name"]: one["value"] for one in container["env"]}
    done = subprocess.run([*container["command"], *container["args"]], env=env, check=False)
    assert done.returncode == code
    submits = [line for line in log.read_text().splitlines() if line.startswith("job submit")]
    assert [line.split()[3] for line in submits] == ["archive-pod-1", "manifests-pod-1", "decode-pod-1"]


def test_the_version_of_ray_is_the_pinned_one() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    stated = {found for path in MANIFESTS for found in re.findall(r'rayVersion: "(.*)"', path.read_text())}
    assert stated == {pinned[1]}


def test_nightly_changes_no_byte() -> None:
    assert load("nightly").recipe == load().recipe
    assert "nightly" not in recipes()


def test_the_image_holds_what_it_copies_and_no_user_with_rights() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert shown == set(copied)
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert int(user.partition(":")[0]) > 0


# -- Grafana --------------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_is_counted() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in asked for name in re.findall(r"ray_(\w+)_total", text)}
    assert named == METERS.keys()
    for text in asked:
        for name, labels in re.findall(r"ray_(\w+)_total\{(.*?)\}", text):
            assert {label.partition("=")[0] for label in labels.split(",")} <= set(METERS[name][1])


# -- S3 policies ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


BUCKET_ACTIONS = {
    "uploads": "s3:ListBucketMultipartUploads",
    "versioning": "s3:GetBucketVersioning",
    "versions": "s3:ListBucketVersions",
}
"""What a request of a bucket with this first parameter needs."""


def actions(requests: list[str]) -> set[tuple[str, str]]:
    """Return the permission that each request of an S3 client needs, with its bucket and key."""
    found = set()
    for line in requests:
        method, target = line.split()
        path, _, query = target.partition("?")
        bucket, _, key = path[1:].partition("/")
        if not key:
            asked = query.partition("&")[0].partition("=")[0]
            found.add((BUCKET_ACTIONS.get(asked, "s3:ListBucket"), bucket))
        elif method in {"GET", "HEAD"}:
            needed = "s3:GetObjectVersion" if "versionId" in query else "s3:GetObject"
            needed += "Tagging" if query.startswith("tagging") else ""
            found.add((needed, f"{bucket}/{key}"))
        elif method == "DELETE":
            found.add(("s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject", f"{bucket}/{key}"))
        else:
            found.add(("s3:PutObjectTagging" if query.startswith("tagging") else "s3:PutObject", f"{bucket}/{key}"))
    return found


def may(policy: Mapping[str, Any], action: str, resource: str) -> bool:
    """Whether the statements without a condition allow `action`."""

    def listed(value: str | list[str]) -> list[str]:
        return [value] if isinstance(value, str) else value

    effects = [
        statement["Effect"]
        for statement in policy["Statement"]
        if "Condition" not in statement
        and any(fnmatchcase(action, pattern) for pattern in listed(statement["Action"]))
        and any(fnmatchcase(f"arn:aws:s3:::{resource}", pattern) for pattern in listed(statement["Resource"]))
    ]
    return "Allow" in effects and "Deny" not in effects


def policy_of(name: str, bucket: str) -> dict[str, Any]:
    """Return a policy of deploy/, its three buckets replaced by prefixes of the bucket of the test."""
    text = (DEPLOY / "aws" / f"{name}.json").read_text()
    for place in ("models", "vault", "restored"):
        text = text.replace(f":::{place}/", f":::{bucket}/{place}/").replace(f':::{place}"', f':::{bucket}"')
    found: dict[str, Any] = json.loads(text)
    return found


def test_policies_allow_what_the_commands_do_and_nothing_that_loses(server: S3Server, tmp_path: Path) -> None:
    weights = safetensors([("w", "BF16", [400, 100], bf16(1, 40_000))])
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "model.safetensors").write_bytes(weights)
    store = S3Store(server.bucket, server.options)
    store._run(store._request("put_bucket_versioning", "", {"VersioningConfiguration": {"Status": "Enabled"}}))
    brevis("restore", *_archived(tmp_path), server.url("models/llama"), env=server.env)
    key = "models/llama/model.safetensors"
    tags = {"TagSet": [{"Key": "stage", "Value": "final"}]}
    store._run(store._request("put_object_tagging", key, {"Key": key, "Tagging": tags}))
    archive, source = server.url("vault/archive"), server.url("models/llama")
    release = ("release-source", source, archive, "--grace", "0", "--yes")
    needed: dict[str, set[tuple[str, str]]] = {}
    with fault_proxy(server.endpoint) as proxy:
        env = {**server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        for name, command in (
            ("archive", ("archive", source, archive, "--workers", "1", "--set", "synth.budget=4")),
            ("restore", ("restore", archive, server.url("restored/llama"), "--workers", "1")),
            ("keep", ("verify", archive, "--receipt", "--workers", "1")),
            ("release", release),
            ("release", release),
        ):
            proxy.requests.clear()
            brevis(*command, env=env)
            needed[name] = needed.get(name, set()) | actions(proxy.requests)
    model = f"{server.bucket}/models/llama/model.safetensors"
    assert ("s3:DeleteObject", model) in needed["release"]
    assert {action for action, _ in needed["archive"]} >= {"s3:GetBucketVersioning", "s3:ListBucketVersions"}
    assert ("s3:GetObjectTagging", model) in needed["archive"]
    for action in ("s3:GetObjectVersion", "s3:GetObjectVersionTagging"):  # for --as-of
        assert may(policy_of("archive", server.bucket), action, model)
    # A PUT with tags looks like any other.
    assert may(policy_of("restore", server.bucket), "s3:PutObjectTagging", f"{server.bucket}/restored/llama/x")
    for name, requests in needed.items():
        policy = policy_of(name, server.bucket)
        refused = sorted(f"{action} {resource}" for action, resource in requests if not may(policy, action, resource))
        assert not refused
        assert {"s3:GetObject", "s3:PutObject", "s3:ListBucket"} <= {action for action, _ in requests}
        assert not may(policy, "s3:DeleteObject", f"{server.bucket}/vault/archive/FORMAT")
        assert not may(policy, "s3:PutObject", model)
        assert may(policy, "s3:DeleteObject", model) is (name == "release")
        removes = any(
            may(policy, "s3:DeleteObject", f"{server.bucket}/vault/archive/{key}") for key in ("packs/1", "snapshots/1")
        )
        assert removes is (name == "keep")


def _archived(tmp_path: Path) -> tuple[str]:
    brevis("archive", str(tmp_path / "llama"), str(tmp_path / "a"), "--workers", "1", "--set", "synth.budget=4")
    return (str(tmp_path / "a"),)
