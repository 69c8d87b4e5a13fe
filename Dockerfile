# The daemons, and a place for programs: zstrat in an image of Python, as nobody in
# particular, with nothing that needs to be written but /tmp.
#
#   docker build -t registry.example/zstrat:0.1 .
#   docker build -t registry.example/zstrat:0.1-cuda --build-arg WITH='jax[cuda12]' .
#
# For a program:  FROM registry.example/zstrat:0.1
#                 COPY train.py .

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG WITH=jax
COPY pyproject.toml README.md LICENSE /source/
COPY zstrat /source/zstrat
COPY daemons /source/daemons
RUN python -m venv /opt/zstrat \
 && /opt/zstrat/bin/pip install --no-cache-dir '/source[prometheus]' "${WITH}" \
 && /opt/zstrat/bin/python -m compileall -q /opt/zstrat/lib

FROM python:${PYTHON}-slim
COPY --from=build /opt/zstrat /opt/zstrat
ENV PATH=/opt/zstrat/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /work
USER 1000:1000
EXPOSE 2222 9100
CMD ["zstrat", "--help"]
