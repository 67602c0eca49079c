"""EXAONE 4: norms only behind attention and MLP, and on each query and key head."""

from quantkit.models.family import UNSMOOTHED_SETS, Family

FAMILY = Family(hf_names=("Exaone4ForCausalLM",), linear_sets=UNSMOOTHED_SETS, native=False)
