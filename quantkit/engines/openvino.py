"""OpenVINO 2026.4.1, run on a CPU: optimum-intel 2.2.0 with gptqmodel 7.6, and openvino-genai for GGUF files.

`exporters` is `optimum/exporters/openvino`.
"""

from quantkit.engines.base import cpu_engine

ENGINE = cpu_engine(
    title="OpenVINO",
    release="2026.4.1, optimum-intel 2.2.0",
    loader="OpenVINO",
    rules="""
wrong format=gptq,gptq-v2 group_order=yes
    scales are taken in order, g_idx is not read; set steps.gptq.act_order=weight
    openvino/frontend/pytorch/gptq.py: patched_forward, patched_forward_sym
unknown format=gptq,gptq-v2 zero_points=yes
    it adds one to zero points, of which it was not tried when they are right; set weights.symmetric=true
    openvino/frontend/pytorch/gptq.py: patched_forward
fast format=gptq,gptq-v2 weights=int4 experts=no
    with gptqmodel installed
    exporters/__main__.py: main_export, do_gptq_patching
no format=awq experts=no
    gptqmodel's AWQ layers cannot be traced: the export stops; set format=gptq
    exporters/__main__.py: main_export
    Tracing failed sanity checks
fast format=gguf weights=int2,int3,int4 zero_points=no experts=no
    Q4_0 files by openvino-genai
    openvino.genai/src/cpp/src/gguf_utils
no format=compressed-tensors
    it exports gptq, awq and bitnet only, and stops while loading others; set format=gptq, gguf or dense
    exporters/__main__.py: main_export, supported_quant_methods
    more than one element of the written-to tensor
unknown
    {linear} in format {format} was not tried
    exporters/__main__.py: main_export, supported_quant_methods
""",
)
