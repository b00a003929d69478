"""Limits of the format, checked before anything is allocated.

They are constants of the format, not settings: a reader that raised them would accept archives that
others refuse.
"""

from __future__ import annotations

SEGMENT_BYTES = 64 << 20
"""Most bytes of one segment, and so of one record's decoded words."""
RECORD_BYTES = SEGMENT_BYTES + (1 << 20)
"""Most bytes of one record: a segment that nothing compresses, and its header."""
PROGRAM_BYTES = 64 << 10
"""Most bytes of a program on the wire."""
PROGRAM_NODES = 256
PROGRAM_DEPTH = 32
PROGRAM_LITERALS = 64
OPERATOR_PARAMS = 64
"""Most parameters of one operator."""
SCRATCH_FIXED_BYTES = 64 << 20
"""Scratch of a program: at most twice the segment and this."""
WORK_FACTOR = 64
"""Words written by all nodes together: at most this many times the words of the segment."""
WORK_FIXED_WORDS = 1 << 20
