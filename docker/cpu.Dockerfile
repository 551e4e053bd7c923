# The harness on a CPU. Build from the repository's root:
#   docker build -f docker/cpu.Dockerfile -t saguaro-harness:cpu .
#   docker run --rm -v harness-runs:/home/harness/app/runs saguaro-harness:cpu methods
FROM python:3.11-slim

# torch.compile needs a C++ compiler; git gives the revision that a run records.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home harness \
    && install --directory --owner harness /home/harness/app /home/harness/app/runs
USER harness
WORKDIR /home/harness/app

ENV PATH=/home/harness/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /home/harness/venv

# torch first, from its CPU index: a layer of its own that code changes do not rebuild.
COPY --chown=harness constraints.txt ./
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch

COPY --chown=harness . .
RUN pip install -c constraints.txt -e .

ENTRYPOINT ["harness"]
CMD ["--help"]
