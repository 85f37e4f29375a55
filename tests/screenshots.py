"""Pictures of a report for the README: `python tests/screenshots.py report.html OUTDIR` (needs selenium and Chromium).

Writes curves.png and browser.png (--at: of another dialogue, as in the page's address). --all: the whole page instead,
in both widths and both colour schemes.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

DESKTOP, PHONE = (1280, 900), (390, 844)


def chromium(profile: str):
    """A headless browser that asks nothing of the network; None where selenium, Chromium or its driver is missing."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        return None
    try:
        from selenium import webdriver
    except ImportError:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless=new", "disable-gpu", "no-first-run", "disable-background-networking", "disable-quic",
                 "disable-component-update", "disable-sync", "hide-scrollbars", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def look(browser, size: tuple[int, int], scheme: str = "light", scale: float = 1) -> None:
    """Sets the window's width and height in CSS pixels, a phone below 500, and the preferred colour scheme."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": size[0] < 500})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})


def shoot(browser, selector: str, path: Path) -> None:
    """What the window shows once it is scrolled to an element."""
    browser.execute_script("document.documentElement.style.scrollBehavior = 'auto';"
                           "document.querySelector(arguments[0]).scrollIntoView()", selector)
    browser.save_screenshot(str(path))
    print(path, f"{path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at", default="", metavar="run=R&step=S&group=G", help="what the browser shows")
    parser.add_argument("--all", action="store_true", help="the whole page, in both widths and schemes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = chromium(profile) or sys.exit("screenshots.py: needs selenium, chromium and chromedriver")
        try:
            browser.get(options.report.resolve().as_uri())
            if options.all:
                for width, size in (("desktop", DESKTOP), ("phone", PHONE)):
                    for scheme in ("light", "dark"):
                        look(browser, size, scheme)
                        browser.refresh()
                        height = browser.execute_script("return document.documentElement.scrollHeight")
                        look(browser, (size[0], min(height, 9000)), scheme)
                        browser.save_screenshot(str(options.out / f"{width}-{scheme}.png"))
            else:
                look(browser, DESKTOP)
                browser.refresh()
                shoot(browser, "#curves", options.out / "curves.png")
                browser.get("about:blank")
                browser.get(f"{options.report.resolve().as_uri()}#{options.at}")
                shoot(browser, ".controls", options.out / "browser.png")
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
