#!/usr/bin/python3
"""A service that counts: counter serve | add | check"""

import getpass
import os
import pathlib
import signal
import socket
import sys
import time

PORT = 7000
PID = pathlib.Path("/tmp/counter.pid")
COUNT = pathlib.Path("/tmp/count")


def serve():
    server = socket.create_server(("127.0.0.1", PORT))
    PID.write_text(f"{os.getpid()}\n")
    print("counting", flush=True)
    while True:
        client, _ = server.accept()
        with client:
            if client.recv(3) == b"add":
                count = int(COUNT.read_text()) + 1 if COUNT.exists() else 1
                COUNT.write_text(str(count))
                client.sendall(str(count).encode())


def add():
    with socket.create_connection(("127.0.0.1", PORT)) as client:
        client.sendall(b"add")
        return int(client.recv(20))


def check():
    assert pathlib.Path("/etc/forkd-child").read_text() == pathlib.Path("/proc/sys/kernel/hostname").read_text()
    # A sibling that counted would be seen here.
    count = add()
    old = int(PID.read_text())
    os.kill(old, signal.SIGKILL)
    # The agent starts the service again; the test has a deadline.
    while True:
        try:
            if int(PID.read_text()) != old and add() == count + 1:
                break
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    prepared = pathlib.Path("/var/lib/prepared").read_text().strip()
    owner = pathlib.Path("/var/lib/prepared").owner()
    print(f"{prepared} by {owner}, {getpass.getuser()} counts to {count}, killed once and back")


{"serve": serve, "add": add, "check": check}[sys.argv[1]]()
