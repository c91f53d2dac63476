"""A cluster none of whose machines has the project: a job brings it along by `--py-files`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import txnbridge
from tests.house.rooms import ROOT

pyspark = pytest.importorskip("pyspark", reason="needs PySpark")

PROGRAM = """
import sys
import pyspark_txnbridge
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
spark.dataSource.register(pyspark_txnbridge.DefaultSource)
rows = spark.range(0, 100, 1, 4).selectExpr("cast(id as string) as value")
options = {"url": sys.argv[1], "createTopics": "2"}
rows.write.format("txnbridge").options(**options, topic="first").mode("append").save()
read = spark.read.format("txnbridge").options(url=sys.argv[1], subscribe="first").load()
read.select("value").write.format("txnbridge").options(**options, topic="second").mode("append").save()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that finds all that is installed here but the project."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    installed = Path(sysconfig.get_paths()["purelib"])
    found = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    for path in installed.iterdir():
        if "txnbridge" not in path.name and path.suffix != ".pth":
            (found / path.name).symlink_to(path)
    return environment / "bin" / "python"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "wheel")]
    subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = (tmp_path / "wheel").iterdir()
    return wheel.rename(tmp_path / "txnbridge.zip")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_job_brings_the_project_along(python, package, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    url = f"embedded:{tmp_path / 'broker.db'}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    missing = subprocess.run([str(python), "-c", "import txnbridge"], cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'txnbridge'" in missing.stderr
    settings = ("spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1")
    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local-cluster[2,1,1024]"]
    for setting in settings:
        submit += ["--conf", setting]
    ended = subprocess.run(
        [*submit, "--py-files", str(package), str(program), url],
        cwd=tmp_path,
        env={**environment, "PYSPARK_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    with txnbridge.connect(url) as bridge:
        for topic in ("first", "second"):
            assert sorted(int(message.value) for message in bridge.read(topic, 1_000)) == list(range(100))
