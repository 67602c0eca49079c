"""The first tokens and the newest ones stay. Source: Xiao et al. 2023, Efficient Streaming Language Models."""

from quantkit.runtime.cache.policies.base import Policy

POLICY = Policy(scores=None)
