# quantkit on a CPU, with the server and the tasks of verify.
#
#   docker build -f docker/cpu.Dockerfile -t quantkit .
#   docker run --rm -v "$PWD:/work" quantkit quantize --recipe awq-int4
#
# TORCH_INDEX: the package index of torch's CPU builds. Without it, torch brings CUDA's libraries, and the image is larger.
FROM python:3.12-slim
ARG TORCH_INDEX=""
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends --yes gcc libc6-dev libgomp1 && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.6,<2.14"
COPY . /src
RUN pip install --no-cache-dir "/src[eval,serve]" && rm -rf /src && useradd --create-home --uid 1000 user
USER 1000
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["quantkit"]
CMD ["--help"]
