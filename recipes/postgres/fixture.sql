-- The rows that every child begins with.
CREATE TABLE account (owner text PRIMARY KEY, balance integer NOT NULL);
INSERT INTO account VALUES ('ada', 100), ('grace', 200), ('linus', 300);
ANALYZE account;
CHECKPOINT;
