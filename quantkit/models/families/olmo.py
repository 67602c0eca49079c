"""OLMo: Llama with layer norms that have no weights, so that nothing can absorb a scale before q or gate."""

from quantkit.models.family import UNSMOOTHED_SETS, Family

FAMILY = Family(hf_names=("OlmoForCausalLM",), linear_sets=UNSMOOTHED_SETS, native=False, norm="bare")
