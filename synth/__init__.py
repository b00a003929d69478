"""The search: from the words of a tensor to the program that restores them in the fewest bytes.

    synthesis = synthesise(words, dtype="BF16", rows=4096, columns=1024, options=options, prior=prior)
    synthesis.program               # for these words
    synthesis.program_for(segment)  # for a part of them, its data-dependent parameters found anew

Read `steps` and `grammar` for what is tried, `prior` and `search` for the order, `cost` for the weighing.
"""

from synth.explain import Explanation, explain
from synth.options import SearchOptions
from synth.prior import Prior
from synth.synthesis import Synthesis, synthesise

__all__ = ["Explanation", "Prior", "SearchOptions", "Synthesis", "explain", "synthesise"]
