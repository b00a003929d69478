"""Importing it loads all that reading an archive needs, kernels included: a process that forks hands it on."""

from operators.run import execute
from pipeline import commands, verify
from pipeline.parquet import from_parquet, to_parquet
from tests.forge import sound

READY = (commands, verify, [execute(record) for _, record in [sound()]], from_parquet(to_parquet([sound()[0]])))
