"""The compose file and what it mounts, with no Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "docker"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
FILES = [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]]


def each(key: str) -> Iterator[tuple[str, Any]]:
    """The services that have a key, and its value."""
    return ((name, service[key]) for name, service in SERVICES.items() if key in service)


def volumes(name: str) -> dict[str, str]:
    """What a service mounts, by the place where it does."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES[name].get("volumes", [])}


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_the_file_is_valid_by_the_compose_specification(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def compose() -> list[str]:
    """The command of Compose v2, which needs no engine to read a file."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
            if done.returncode == 0 and not done.stdout.startswith("1."):
                return command
    pytest.skip("Docker Compose v2 is not installed")


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_compose_reads_the_files_and_insists_on_a_password(compose: list[str], files: list[str]) -> None:
    command = [*compose, *(f"--file={FOLDER / name}" for name in files), "config", "--quiet"]
    environment = {**os.environ, "GRAFANA_ADMIN_PASSWORD": "of a test"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment["GRAFANA_ADMIN_PASSWORD"] = ""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "GRAFANA_ADMIN_PASSWORD" in done.stderr


def test_ports_are_published_on_the_loopback_address_only() -> None:
    published = [port for _, ports in each("ports") for port in ports]
    assert published
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert not list(each("network_mode"))


def test_no_secret_is_in_the_file() -> None:
    for name, environment in each("environment"):
        for variable, value in environment.items():
            if re.search("PASSWORD|TOKEN|SECRET|KEY", variable):
                assert re.fullmatch(r"/run/secrets/\w+|\$\{\w+:\?.+\}", value), f"{variable} of {name}"
    assert all(set(secret) == {"environment"} for secret in COMPOSE["secrets"].values())


def test_a_secret_that_is_read_is_mounted() -> None:
    for name, environment in each("environment"):
        for value in environment.values():
            if value.startswith("/run/secrets/"):
                assert Path(value).name in SERVICES[name]["secrets"]
    (ray,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    authorization = ray["http_sd_configs"][0]["authorization"]
    assert Path(authorization["credentials_file"]).name in SERVICES["prometheus"]["secrets"]


def test_an_image_has_a_digest_or_is_built_here_with_the_version_as_its_tag() -> None:
    for name, image in each("image"):
        if "build" in SERVICES[name]:
            assert image == f"hfta-tune:{version('hfta-tune')}-cpu"
            dockerfile = SERVICES[name]["build"]["dockerfile"]
            assert (FOLDER / SERVICES[name]["build"]["context"] / dockerfile).is_file()
        else:
            assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", image), image


def test_services_have_no_privileges() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "user"} & set(service)


def test_what_is_mounted_exists() -> None:
    for name in SERVICES:
        for source in volumes(name).values():
            assert source in COMPOSE["volumes"] or (FOLDER / source).exists(), f"{source} of {name}"


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    provisioning = FOLDER / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == SERVICES["ray"]["environment"]["RAY_PROMETHEUS_HOST"]
    assert urlsplit(source["url"]).hostname in SERVICES
    (provider,) = yaml.safe_load((provisioning / "dashboards/dashboards.yaml").read_text())["providers"]
    shown = provider["options"]["path"]
    written = [
        SERVICES["dashboards"]["command"][-1],
        SERVICES["ray"]["environment"]["RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"],
    ]
    assert all(str(Path(path).parent) == shown for path in written)
    assert volumes("grafana")[shown] == volumes("dashboards")[shown] == volumes("ray")[shown]


def test_prometheus_reads_its_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    command = [promtool, "check", "config", "--syntax-only", FOLDER / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
