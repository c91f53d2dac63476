# docker run --rm --network host -v "$PWD:/out" IMAGE run kafka://localhost:9092 --time 10m --out report
FROM python:3.13-slim
# txnbridge is on no package index yet: its wheel is in the folder wheels.
COPY wheels/ wheels/
RUN pip install --no-cache-dir --find-links wheels "txnbridge[conformance,kafka,pulsar]"
WORKDIR /out
ENTRYPOINT ["txnbridge", "conformance"]
