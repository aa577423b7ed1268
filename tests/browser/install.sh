#!/bin/sh
# What drives the browser, from npm's registry; one line where it cannot be had, and a failure of that in CI.
cd "$(dirname "$0")" || exit 1
command -v npm >/dev/null || exit 0
made=node_modules/.package-lock.json # npm writes it last
[ -e "$made" ] && [ ! package-lock.json -nt "$made" ] && exit 0
npm ci --no-audit --no-fund --loglevel=error --fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-retry-maxtimeout=5000 \
  --fetch-timeout=20000 >npm.log 2>&1 && rm npm.log && exit 0
rm -rf node_modules
if [ -n "$CI" ]; then
  cat npm.log >&2
  exit 1
fi
echo "npm cannot install what drives the browser ($(grep -m1 -o 'code E[A-Z_]*' npm.log || echo 'see tests/browser/npm.log')): the tests of the site in a browser are skipped"
