"""The jobs: archive, restore, verify and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.opening import Archive


def open(  # noqa: A001 -- read as `pipeline.open`
    uri: str | PathLike[str],
    snapshot: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    as_of: str | None = None,
) -> Archive:
    """Open a snapshot of an archive for reading; see `pipeline.opening.Archive`.

    ::

        archive = pipeline.open("s3://vault")
        weight = archive.tensor("lm_head.weight")  # numpy; words where numpy lacks the dtype
        model.load_state_dict(archive.state_dict(device="cuda"))
        with archive.open("config.json") as file:
            config = json.load(file)
    """
    from pipeline.opening import Archive  # not for whoever wants another module of this package

    return Archive(uri, snapshot, storage_options, as_of)
