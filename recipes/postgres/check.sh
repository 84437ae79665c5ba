#!/bin/sh
# Adds a row with the name of this child. A row of another child would be counted, too.
set -eu
name=$(cat /proc/sys/kernel/hostname)
psql -qAt -v ON_ERROR_STOP=1 -v name="$name" <<'SQL'
INSERT INTO account VALUES (:'name', 1);
SELECT count(*) FILTER (WHERE owner IN ('ada', 'grace', 'linus') AND balance % 100 = 0) || ' rows of the fixture, '
    || count(*) FILTER (WHERE owner NOT IN ('ada', 'grace', 'linus')) || ' of this child'
    FROM account;
SQL
