"""Execution of requests step by step: scheduler, runner, speculation, CUDA graphs and threads."""
