# quantkit on NVIDIA GPUs, with the server and the tasks of verify. torch's wheels bring CUDA's libraries; the host needs
# the driver and the NVIDIA Container Toolkit.
#
#   docker build -f docker/cuda.Dockerfile -t quantkit:cuda .
#   docker run --rm --gpus all -v "$PWD:/work" -p 127.0.0.1:8000:8000 quantkit:cuda serve MODEL --host 0.0.0.0 --no-api-key
FROM python:3.12-slim
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# gcc: quantkit compiles its CPU kernels, and Triton its launchers, at first use.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends --yes gcc libc6-dev libgomp1 && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir "/src[cuda,eval,serve]" && rm -rf /src && useradd --create-home --uid 1000 user
USER 1000
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["quantkit"]
CMD ["--help"]
