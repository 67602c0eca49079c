"""DeepSeek-V3.2, counted only: DeepSeek-V3 with an indexer that picks which entries of the cache a query reads."""

from quantkit.models.family import BALANCED_EXPERTS, Family

FAMILY = Family(latent=True, experts=BALANCED_EXPERTS, defaults={"index_head_dim": 128}, native=False)
