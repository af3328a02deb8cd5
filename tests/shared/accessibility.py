"""What axe-core finds wrong on a page."""

from typing import Any


def findings(page: Any) -> list[str]:
    """Return the rules of axe-core that a page breaks, with the elements that break them."""
    from axe_playwright_python.sync_playwright import Axe

    broken = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['target'][-1]} ({rule['help']})" for rule in broken for node in rule["nodes"]
    ]
