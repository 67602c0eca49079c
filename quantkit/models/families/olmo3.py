"""OLMo 3: OLMo 2 with a window in three layers of four."""

from quantkit.models.family import UNSMOOTHED_SETS, Family

FAMILY = Family(hf_names=("Olmo3ForCausalLM",), linear_sets=UNSMOOTHED_SETS, native=False)
