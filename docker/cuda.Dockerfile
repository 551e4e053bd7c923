# The harness on NVIDIA GPUs, with flash-attn built for its torch. Build from the repository's root:
#   make docker DEVICE=cuda
# torch 2.13 is built with CUDA 13.0 and brings its libraries; the host's driver must be R580 or newer.
FROM nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04@sha256:0230b7f243483cb15969fa3cc724a9459599604427052fc2a0d4291c7c0647dd AS flash-attn

# hadolint ignore=DL3008 # Ubuntu keeps no old versions: pinned ones would stop building.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY constraints.txt ./
RUN pip install -c constraints.txt torch setuptools packaging psutil ninja wheel
# Compute capabilities to build for: 80 is A100, 90 is H100 and H200, 100 is B200.
ARG FLASH_ATTN_CUDA_ARCHS="80;90"
ARG MAX_JOBS=8
# Built here and not fetched ready-made, so that it fits this torch whatever its project offers.
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE pip wheel --no-deps --no-build-isolation --wheel-dir wheels -c constraints.txt flash-attn

FROM nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1

# Python's headers and a compiler: Triton builds launchers, the harness its CPU kernels.
# hadolint ignore=DL3008 # Ubuntu keeps no old versions: pinned ones would stop building.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# Links below /usr/local/bin, since a login shell (Kubernetes' Ray operator) forgets PATH.
RUN useradd --create-home --uid 1001 harness \
    && install --directory --owner harness /opt/venv /data /home/harness/app \
    && ln -s /opt/venv/bin/harness /opt/venv/bin/ray /usr/local/bin/
USER 1001
WORKDIR /home/harness/app

ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HARNESS_CACHE_DIR=/data/cache
RUN python3.12 -m venv /opt/venv

# torch and flash-attn first: a layer of its own that code changes do not rebuild.
COPY --chown=harness constraints.txt ./
COPY --from=flash-attn /build/wheels /home/harness/wheels
RUN pip install --find-links /home/harness/wheels -c constraints.txt torch flash-attn

COPY --chown=harness . .
RUN pip install --find-links /home/harness/wheels -c constraints.txt -e '.[cuda,ray]'

VOLUME /data
ENTRYPOINT ["harness"]
CMD ["--help"]
