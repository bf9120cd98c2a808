"""YAML files as users write them: read as UTF-8, mistakes told with file and line, no key twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pat.problems import ConfigError, Problem, shown


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML silently keeps the last of two equal keys, so that of two experiments of a name one is lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # PyYAML refuses it
            if key.value in seen:
                where = f"line {key.start_mark.line + 1}"
                raise ConfigError(Problem((key.value,), f"it a second time at {where}", "each key once"))
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: str | Path, option: str = "--config") -> Any:
    """Contents of a YAML file. Raises ConfigError if it is missing, is not YAML, or has a key twice."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # an editor may have put a mark first
        return yaml.load(text, _UniqueKeys)
    except OSError as error:
        reason = f"a file that can be read ({error.strerror})"
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        reason = f"UTF-8 text ({path}, line {line}: byte 0x{error.object[error.start]:02x} is none)"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f", {error.context} at line {error.context_mark.line + 1}" if error.context_mark else ""
        reason = f"valid YAML ({path}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context})"
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"valid YAML ({path}, line {line}: character {error.character!r} is not allowed)"
    except yaml.YAMLError as error:
        reason = f"valid YAML ({path}: {' '.join(str(error).split())})"
    raise ConfigError(Problem((option,), shown(str(path)), reason))
