# pushrep with Spark, Kafka's clients and Java: what replicas, Spark's master and workers, and the jobs run in.
# Build it from the project's top: docker build -t pushrep:0.2.0 .
FROM maven:3.9.11-eclipse-temurin-17 AS connector
COPY tests/spark/pom.xml tests/spark/jars.sha256 /
# The sums of what Maven gave when the versions were chosen: another file ends the build.
RUN mvn -q -B -f /pom.xml dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=/jars \
    && cd /jars && sha256sum --check --quiet --strict /jars.sha256 && test "$(ls | wc -l)" = "$(wc -l < /jars.sha256)"

FROM python:3.11.14-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless openssl procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/pushrep
COPY constraints.txt pyproject.toml README.md CHANGELOG.md LICENSE NOTICE ./
COPY filtering filtering
COPY partitioner partitioner
COPY pushrep pushrep
COPY spark_jobs spark_jobs
# Dependency groups want a pip of 25.1 or newer.
RUN pip install --no-cache-dir 'pip>=25.1' \
    && pip install --no-cache-dir -c constraints.txt -e '.[kafka,spark,sql]' --group demo-kafka
# The demos are in the repository only.
COPY examples/demo examples/demo
COPY examples/certificates.sh examples/
COPY tests/support/kafka_node.py tests/support/
ENV PYTHONPATH=/opt/pushrep
# Also among Spark's own jars, so that `--source kafka` wants nothing said.
COPY --from=connector /jars/ /opt/spark-kafka/
RUN ln -s /opt/spark-kafka/*.jar /usr/local/lib/python3.11/site-packages/pyspark/jars/
# A new volume belongs to whom the directory below it belongs to.
RUN useradd --uid 10001 --create-home --home-dir /var/lib/pushrep pushrep && install -d -o pushrep -g pushrep /data /shared
USER pushrep
WORKDIR /var/lib/pushrep
ENV PYSPARK_PYTHON=python3
