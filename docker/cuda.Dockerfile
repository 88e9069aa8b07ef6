# hfta_tune with the CUDA build of PyTorch. The context is the repository's root; README.md beside this file says how to build.

FROM python:3.11.15-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba AS base

FROM base AS build
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/venv
COPY constraints.txt ./
# On Linux, PyPI's builds are for CUDA and bring its libraries; the host needs NVIDIA's driver and container toolkit only.
RUN pip install -c constraints.txt torch \
    && python -c 'import torch; assert torch.version.cuda, "no CUDA build of torch: which index is pip on?"'
COPY pyproject.toml README.md LICENSE ./
COPY hfta_tune hfta_tune
COPY searchers searchers
RUN pip install -c constraints.txt ".[dashboard,examples]"

FROM base
# With a C++ compiler torch.compile works, and long runs compile their steps.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*
# A volume mounted at /dashboards gets this owner.
RUN useradd --create-home --uid 1000 hfta \
    && install --directory --owner=hfta --group=hfta /dashboards
COPY --from=build /opt/venv /opt/venv
COPY examples /opt/examples
ENV PATH=/opt/venv/bin:$PATH \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /home/hfta
CMD ["hfta-tune", "--help"]
