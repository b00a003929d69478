"""From the listing of a source to the plan of a run: what is taken from the base, how the rest is cut, what is alike.

A run is named by what it is to do, so that whoever does the same finds its plan and goes on from it; only who finds
none looks into the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from operators.errors import ArchiveError
from pipeline.commit import Draft, adopt_headers, adopt_plan, adopt_rows, find_headers, find_plan
from pipeline.duplicates import Earlier, gathered
from pipeline.plan import Finding, Part, Plan, make_plan
from pipeline.rows import Rows, held_segments
from pipeline.sampling import Fingerprints, Sample, sample_files
from pipeline.segments import HEAD_BYTES, Layout, layout_of
from pipeline.store import Headers, ObjectInfo, SourceStore, Store
from pipeline.summary import Failed

Watch = Callable[[Iterable[Sample]], Iterator[Sample]]
"""Passes samples on, learning from them."""
LAYOUT_REQUESTS = 16
"""Headers read at the same time."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What a run is going to do.

    Attributes
    ----------
    draft : Draft
        Of the snapshot; it names the run.
    plan : Plan
        Of the files that are to be read.
    unchanged : Rows
        Of the files that are not.
    failures : list of Failed
        Files that could not be planned.
    """

    draft: Draft
    plan: Plan
    unchanged: Rows
    failures: list[Failed]

    @property
    def is_small_change(self) -> bool:
        """Whether less than half of the bytes is read: what the base had learned from all of them serves these too."""
        return self.plan.n_bytes < int(self.unchanged.integers("n_bytes").sum())

    @property
    def warnings(self) -> list[Finding]:
        """Faults of formats, in the order of keys within the files that are read and those that are not."""
        known = dict(self.unchanged.values("file", "reason"))
        return [*self.plan.warnings, *(Finding(key, reason) for key, reason in known.items() if reason is not None)]


def plan_run(
    source: SourceStore,
    archive: Store,
    draft: Draft,
    earlier: Earlier,
    task_bytes: int,
    *,
    checksum: bool = False,
    watch: Watch = iter,
) -> Planned:
    """Plan a run, or take up the plan that it has already.

    Parameters
    ----------
    source, archive : SourceStore, Store
    draft : Draft
        With the inventory of the source.
    earlier : Earlier
        What may be taken from the base.
    task_bytes : int
        Source bytes that a task aims at.
    checksum : bool
        Read every file, also those that did not change.
    watch : callable
        Sees the samples of the planning pass, which is not made where the plan is there.
    """
    known = {} if checksum else earlier.unchanged(draft.inventory)
    unchanged = Rows.joined(known.values())
    rest = [info for info in draft.inventory if info.key not in known]
    # An attempt that lacks something plans otherwise, so it is another run: it must not bind one that does not.
    apart = [*draft.apart, *(["--checksum"] if checksum else []), *sorted(finding.key for finding in earlier.lost)]
    draft = replace(draft, apart=tuple(apart))
    failures: list[Failed] = []
    plan = find_plan(archive, draft.run, rest)
    if plan is None:
        plan, failures, headers = fresh_plan(source, rest, task_bytes, watch)
        headers |= {key: earlier.headers[key] for key in known if key in earlier.headers}
        if failures:
            draft = replace(draft, apart=(*apart, *sorted(failure.key for failure in failures)))
        draft = replace(draft, headers=adopt_headers(archive, draft.run, headers))
        plan = adopt_plan(archive, draft.run, plan, plan.files)
    else:
        draft = replace(draft, headers=find_headers(archive, draft.run))
    failures += [Failed(found.key, found.reason, found.detail, "run again") for found in plan.failures]
    adopt_rows(archive, draft.run, unchanged)
    return Planned(draft, plan, unchanged, failures)


def fresh_plan(
    source: SourceStore, files: Sequence[ObjectInfo], task_bytes: int, watch: Watch = iter
) -> tuple[Plan, list[Failed], dict[str, Headers]]:
    """Cut every file and gather what is alike; those that cannot be read are failures and left out.

    The headers, by key, are what the source keeps beside the bytes of the others.

    Raises
    ------
    StoreError
        The source failed while it was sampled.
    """
    layouts: list[tuple[ObjectInfo, Layout]] = []
    failures: list[Failed] = []
    headers: dict[str, Headers] = {}
    with ThreadPoolExecutor(LAYOUT_REQUESTS) as pool:
        for info, outcome in zip(files, pool.map(lambda info: _layout(source, info), files), strict=True):
            if isinstance(outcome, ArchiveError):
                failures.append(Failed.of(info.key, outcome))
                continue
            layout, told = outcome
            layouts.append((info, layout))
            if told:
                headers[info.key] = told
    parts = [Part(info, layout.format, layout.reason, layout.segments) for info, layout in layouts if layout.segments]
    fingerprints = Fingerprints()
    for _ in fingerprints.watch(watch(sample_files(source, parts))):
        pass
    plan = make_plan(
        [info for info, _ in layouts],
        [layout for _, layout in layouts],
        task_bytes,
        {part.info.key: fingerprints.of(part) for part in parts},
    )
    return gathered(plan, task_bytes), failures, headers


def _layout(source: SourceStore, info: ObjectInfo) -> tuple[Layout, Headers] | ArchiveError:
    """Look at a file; where the source keeps more than its bytes, the request for that gives the first of them too."""
    try:
        head, headers = source.first(info, min(info.n_bytes, HEAD_BYTES)) or (b"", ())

        def read(offset_bytes: int, n_bytes: int) -> bytes:
            stop = offset_bytes + n_bytes
            if stop <= len(head):
                return head[offset_bytes:stop]
            return bytes(source.get_ranges(info, [(offset_bytes, stop)])[0])

        return layout_of(read, info.key, info.n_bytes, hold=held_segments), headers
    except ArchiveError as error:
        return error
