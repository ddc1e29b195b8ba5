"""Pages of the site outside docs/: pages of the repository's root, and the settings."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from pagewire.config import GatewayConfig, SchedulerConfig, SimulatedWorkerConfig, WorkerConfig

ROOT = Path(__file__).parent.parent
ROOT_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
COMMANDS = {
    "pagewire gateway": GatewayConfig,
    "pagewire scheduler": SchedulerConfig,
    "pagewire worker": WorkerConfig,
    "pagewire simulated-worker": SimulatedWorkerConfig,
}
# Links to files that are not pages work in a checkout, and are plain text on the site.
_NO_PAGE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        for other in ROOT_PAGES:
            text = text.replace(f"]({other}", f"]({other.lower()}")
        files.append(File.generated(config, name.lower(), content=text))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Turn links that leave docs/ into text."""
    return _NO_PAGE.sub(r"\1", markdown)


def settings_page() -> str:
    """Every setting of every service as Markdown tables, from the configuration classes."""
    lines = ["# Settings", "", "One setting is a flag, an environment variable and a key of a"]
    lines += ["configuration file: `--num-blocks`, `PAGEWIRE_NUM_BLOCKS`, `num_blocks`.", ""]
    for command, config in COMMANDS.items():
        lines += [f"## `{command}`", "", "| flag | default | meaning |", "|---|---|---|"]
        for field in fields(config):
            flag = "--" + field.name.replace("_", "-")
            default = "" if field.default in (None, "", MISSING) else f"`{field.default}`"
            lines.append(f"| `{flag}` | {default} | {field.metadata['help']} |")
        lines.append("")
    return "\n".join(lines)
