#!/usr/bin/env bash
# Checks OPCHECK_FILES with OPCHECK_OPTIONS for action.yml; the status is opcheck's. Installs the llmk of the action's
# own revision where there is none.
set -euo pipefail

if ! python -c "import importlib.util as util; raise SystemExit(util.find_spec('llmk') is None)"; then
    python -m pip install "$GITHUB_ACTION_PATH"
fi

status=0
# shellcheck disable=SC2086  # both are split into words, and patterns are expanded
python -m llmk.opcheck $OPCHECK_FILES $OPCHECK_OPTIONS --sarif "$OPCHECK_SARIF" || status=$?
if [[ -f $OPCHECK_SARIF ]]; then
    echo "sarif=$OPCHECK_SARIF" >> "$GITHUB_OUTPUT"
fi
exit "$status"
