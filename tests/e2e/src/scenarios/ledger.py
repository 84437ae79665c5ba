"""Keeps a SQLite database and a conversation over TCP that have to agree, and ends when they do not.

Each round says a number to an echo in another process and writes it down in a transaction with a link of a chain of
checksums. `/run/ledger` holds the last number up to which everything was checked. Old entries go, so that a check takes
no longer after hours than after minutes; the link they ended with stays.
"""
import hashlib
import os
import socket
import sqlite3
import sys
import time

CHECK_EVERY = 4
KEEP = 400


def echo(connection):
    for line in connection.makefile("r"):
        connection.sendall(line.encode())


def talk():
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        echo(listener.accept()[0])
        sys.exit()
    connection = socket.create_connection(listener.getsockname())
    return connection, connection.makefile("r")


def link(before, number):
    return hashlib.sha256(f"{before} {number}".encode()).hexdigest()


def check(database, number):
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    expected, chain = database.execute("SELECT number, link FROM gone").fetchone()
    for found, stored in database.execute("SELECT number, link FROM entry ORDER BY number"):
        expected += 1
        chain = link(chain, expected)
        assert (found, stored) == (expected, chain), f"{found} where {expected} belongs"
    assert expected == number, f"the last entry is {expected}, not {number}"


def forget(database, last):
    database.execute("BEGIN IMMEDIATE")
    database.execute("UPDATE gone SET (number, link) = (SELECT number, link FROM entry WHERE number = ?)", (last,))
    database.execute("DELETE FROM entry WHERE number <= ?", (last,))
    database.execute("COMMIT")


def main(path):
    connection, answers = talk()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE entry (number INTEGER PRIMARY KEY, link TEXT NOT NULL)")
    database.execute("CREATE TABLE total (number INTEGER NOT NULL)")
    database.execute("INSERT INTO total VALUES (0)")
    database.execute("CREATE TABLE gone (number INTEGER NOT NULL, link TEXT NOT NULL)")
    database.execute("INSERT INTO gone VALUES (0, '')")
    number, chain = 0, ""
    while True:
        number += 1
        chain = link(chain, number)
        connection.sendall(f"{number}\n".encode())
        answer = answers.readline()
        assert answer == f"{number}\n", f"the echo of {number} is {answer!r}"
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO entry VALUES (?, ?)", (number, chain))
        database.execute("UPDATE total SET number = number + 1")
        database.execute("COMMIT")
        (total,) = database.execute("SELECT number FROM total").fetchone()
        assert total == number, f"the total is {total}, not {number}"
        if number % CHECK_EVERY == 0:
            check(database, number)
            with open("/run/ledger.new", "w") as file:
                file.write(str(number))
            os.rename("/run/ledger.new", "/run/ledger")
        if number % KEEP == 0 and number > KEEP:
            forget(database, number - KEEP)
        # Others need the processor too; a cut comes at any point of a round all the same.
        time.sleep(0.01)


main(sys.argv[1])
