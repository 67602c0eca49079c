"""OLMo: Llama with layer norms that have no weights, so that nothing can absorb a scale before q or gate."""

from quantkit.models.family import Family

FAMILY = Family(hf_names=("OlmoForCausalLM",), native=False, norm="bare")
