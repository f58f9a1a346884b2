"""The pages: nothing from outside, no data without a token, sentences that say what the numbers say; in a browser where one is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.local_service import local_service
from api.verdict import verdict
from specs.answer import BrokenLimit, PlanAnswer
from tests.api_client import finished, serving
from tests.api_fake import CLUSTER, CONFIG, WORKLOAD, FakeEngine

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with serving(tmp_path_factory.mktemp("service"), FakeEngine()) as client:
        yield client


def test_pages_load_nothing_from_outside(client: TestClient) -> None:
    files = ["app.css", "common.js", "start.js", "plan.js", "icon.svg"]
    for path in ["/", "/plans/any", *[f"/static/{name}" for name in files]]:
        response = client.get(path)
        assert response.status_code == 200, path
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", response.text), path
    page = client.get("/")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert all(name.startswith("/") for name in re.findall(r'(?:src|href)="([^"#]+)"', page.text))
    assert client.get("/static/app.py").status_code == 404
    assert client.get("/static/..%2fapp.py").status_code == 404


def test_plot_library_is_the_installed_one_and_cached(client: TestClient) -> None:
    first = client.get("/static/plotly.js")
    assert first.headers["content-type"].startswith("text/javascript")
    assert client.get("/static/plotly.js", headers={"If-None-Match": first.headers["ETag"]}).status_code == 304


def test_a_plan_as_sentences_tables_and_figures(client: TestClient) -> None:
    path = client.post("/v1/plans", json={"model": CONFIG, "cluster": CLUSTER, "workload": WORKLOAD}).headers["Location"]
    finished(client, path)
    view = client.get(f"{path}/view").json()
    assert view["verdict"][0] == "Train with data parallel over 2 on 2 devices: proven best of the searched space."
    assert "400 tokens per second" in view["verdict"][1]
    assert set(view["figures"]) == {"waterfall", "memory", "timeline"}
    assert view["stages"][0]["mesh"] == "dp 2"
    assert view["title"] == "llama on pair"
    names = client.get("/v1/catalogue").json()
    assert "llama-demo" in names["model_presets"]
    assert {"name", "device", "devices_per_node"} == set(names["node_presets"][0])


def test_pages_are_open_and_their_data_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, FakeEngine(), token="secret") as client:
        assert client.get("/").status_code == 200
        assert client.get("/plans/plan-1").status_code == 200
        assert client.get("/v1/catalogue").status_code == 401
        assert client.get("/v1/plans/plan-1/view").status_code == 401


def test_no_plan_in_words() -> None:
    limit = BrokenLimit(limit="memory", message="4 GiB are missing", relaxations=("zero=3",))
    assert verdict(PlanAnswer(status="infeasible", limits=(limit,))) == [
        "No plan keeps the limits.", "4 GiB are missing.", "Would help: zero=3.",
    ]  # fmt: skip
    assert verdict(PlanAnswer(status="timed_out"))[0] == "No plan was found in the time given."


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_browser(tmp_path: Path) -> None:
    """One click from the start page to a plan; no console error, nothing fetched from elsewhere, no accessibility violation."""
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with local_service(tmp_path, num_devices=0) as service, playwright.sync_playwright() as p:
        base = service.base_url
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(base)
        page.wait_for_selector("#node option", state="attached")
        page.click("#example")
        page.wait_for_selector("#timeline .main-svg", timeout=90_000)
        assert "proven best" in page.inner_text("#verdict")
        page.fill("#asked", "tp=8 dp=2 micro_batch=1 zero=1")
        page.click("#why button")
        page.wait_for_selector("#reason table")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert axe.Axe().run(page).response["violations"] == []
        assert said == []
        assert [url for url in asked if not url.startswith((base, "data:", "blob:"))] == []
        browser.close()
