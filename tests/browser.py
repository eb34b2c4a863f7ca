"""Look at a page in a real browser, where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(page: Path, profile: Path, *flags: str, width: int = 1200) -> tuple[str, str]:
    """The page's document and whatever its console said."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}", f"--window-size={width},1000",
            "--enable-logging=stderr", "--dump-dom", *flags, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to look at the page with")


# A page around the page, since a headless window is never narrower than 500: how far it reaches to the right, and the
# least contrast of its texts.
PROBE = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe style="border: 0; width: WIDTHpx; height: 900px" srcdoc="PAGE"></iframe>
<script>addEventListener("load", () => {
  const inner = document.querySelector("iframe").contentWindow, page = inner.document;
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = rgb => rgb.map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const paper = light(rgb(inner.getComputedStyle(page.body).backgroundColor));
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const contrasts = (chosen, property) => [...page.querySelectorAll(chosen)]
    .map(e => ratio(light(rgb(inner.getComputedStyle(e)[property])), paper));
  document.documentElement.dataset.probe = JSON.stringify({
    width: page.documentElement.scrollWidth, window: inner.innerWidth, paper,
    text: Math.min(...contrasts("p, td:not(.none), th, dt, dd, h1, h2, h3, figcaption", "color")),
    drawn: Math.min(...contrasts("svg text", "fill")) });
});</script>"""
