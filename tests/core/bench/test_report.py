"""The HTML report and the table."""

from __future__ import annotations

import base64
import html.parser
import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from .conftest import Answer


class Page(html.parser.HTMLParser):
    """Addresses, cells and images of a page."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.headings = []
        self.tags = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "style")]

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "h2" and data.strip():
            self.headings.append(data.strip())


def svgs(page):
    return [base64.b64decode(address.split(",", 1)[1]) for address in page.addresses]


def test_the_report_stands_alone_and_has_every_plot(server, bench, tmp_path):
    server.answer = lambda index, body: (
        Answer(status=503) if index == 2 else Answer(ttft=0.01, gap=0.002)
    )
    path = tmp_path / "report.html"
    arguments = ["--num-prompts", 6, "--request-rate", "50,100", "--output-tokens", 5]
    arguments += ["--model", "<b>&", "--goodput", "ttft:1000", "--report", path]
    status, out, _ = bench("--url", server.url, *arguments)
    assert status == 0
    assert re.search(r"Failed requests +1 +0", out)
    assert "Request goodput" in out
    text = path.read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "&lt;b&gt;&amp;" in text
    assert len(page.addresses) == 5
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert "url(" not in text
    assert "@import" not in text
    titles = []
    for svg in svgs(page):
        root = ElementTree.fromstring(svg)
        titles.append(
            " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
        )
        for node in root.iter():
            for name, value in node.attrib.items():
                if name.endswith("href"):
                    assert value.startswith(("#", "data:"))
    assert "offered load (req/s)" in titles[0]
    for label in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert label in titles[0]
        assert label in titles[1]
    assert "TTFT by time of sending" in titles[2]
    assert "1 failed: HTTP 503" in text


def test_one_run_has_no_plot_over_load(server, bench, tmp_path):
    path = tmp_path / "report.html"
    arguments = ["--num-prompts", 2, "--output-tokens", 1, "--report", path]
    assert bench("--url", server.url, *arguments)[0] == 0
    page = Page(path.read_text())
    assert len(page.addresses) == 2
    assert page.headings == ["all at once: distributions", "all at once: timelines"]


def test_a_run_that_failed_has_a_report_without_plots(server, bench, tmp_path):
    server.answer = lambda index, body: Answer(status=500)
    path = tmp_path / "report.html"
    arguments = ["--num-prompts", 2, "--output-tokens", 1, "--report", path]
    assert bench("--url", server.url, *arguments)[0] == 1
    page = Page(path.read_text())
    assert page.addresses == []
    assert "2 failed: HTTP 500" in path.read_text()


def test_a_missing_library_is_named_before_the_run(server, bench, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec

    def without_matplotlib(name, *rest):
        return None if name == "matplotlib" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_matplotlib)
    status, _, err = bench("--url", server.url, "--report", tmp_path / "report.html")
    assert status == 2
    assert "pip install 'polysilicon[bench]'" in err
    assert not server.probed


def test_the_command_line_as_such_loads_neither_aiohttp_nor_matplotlib():
    code = (
        "import polysilicon.commands.application, sys\n"
        "print({'aiohttp', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "set()"
