"""ONNX Runtime GenAI 0.18.0, its model builder for CPUs, run there; `models` is `onnxruntime_genai/models`."""

from quantkit.engines.base import cpu_engine

ENGINE = cpu_engine(
    title="ONNX Runtime",
    release="GenAI 0.18.0",
    loader="the builder",
    rules="""
no format=compressed-tensors,modelopt
    its builder takes compressed-tensors and ModelOpt for CUDA only; set format=gptq, awq or dense
    models/builder.py: check_extra_options
    only supported on the CUDA EP
wrong format=gptq-v2
    it adds one to all zero points, as version 1 stores them: other numbers; set format=gptq
    models/loaders/gptq.py: GPTQModel.handle_qzeros
fast format=gptq,awq weights=int4 groups=32,64,128 experts=no
    MatMulNBits kernels, with accuracy_level=1 activations stay as they are
    models/loaders/gptq.py, awq.py
no format=gguf weights=int2,int3,int4,int5,int6,int8,mxfp4
    its builder reads GGUF files of float16 and float32 only; set format=gptq, awq or dense
    models/loaders/gguf.py: GGUFModel
    is invalid for input of size
no format=fp8,bitsandbytes,torchao
    its builder has no loader of {format}; set format=gptq, awq or dense
    models/loaders/quant_model.py: QuantModel.from_pretrained
unknown
    {linear} in format {format} was not tried
    models/loaders/quant_model.py: QuantModel.from_pretrained
""",
)
