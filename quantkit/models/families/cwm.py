"""CWM: Llama with a window in three layers of four."""

from quantkit.models.family import Family, Rope, Window

FAMILY = Family(
    hf_names=("CwmForCausalLM",),
    window=Window(rule="pattern", pattern=4, first=True),
    rope=Rope(theta=1_000_000.0),
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
)
