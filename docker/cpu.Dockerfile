# The harness on a CPU. Build from the repository's root: make docker
FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

# A C++ compiler builds the fused kernels at their first use; git gives the revision of a run.
# hadolint ignore=DL3008 # Debian keeps no old versions: pinned ones would stop building.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
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
RUN python -m venv /opt/venv

# torch first, from its CPU index: a layer of its own that code changes do not rebuild.
COPY --chown=harness constraints.txt ./
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch

COPY --chown=harness . .
RUN pip install -c constraints.txt -e '.[ray]'

VOLUME /data
ENTRYPOINT ["harness"]
CMD ["--help"]
