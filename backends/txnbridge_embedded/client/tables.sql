-- the tables of the broker's file in schema version 2. schema.py has the layout of message row ids

CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;

CREATE TABLE topics(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
  retention_ms INTEGER, retention_bytes INTEGER, created_at INTEGER NOT NULL);

-- first: the oldest offset that is kept. next: the offset to give next. bytes: all that was ever written
CREATE TABLE partitions(
  id INTEGER PRIMARY KEY AUTOINCREMENT, topic_id INTEGER NOT NULL, number INTEGER NOT NULL,
  first INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
  UNIQUE(topic_id, number));

-- partitions of deleted topics whose messages are still to be removed
CREATE TABLE garbage(partition_id INTEGER PRIMARY KEY);

-- id: partition << 40 | offset. headers: JSON pairs, values as Latin-1
CREATE TABLE messages(
  id INTEGER PRIMARY KEY, timestamp INTEGER NOT NULL, key BLOB, headers TEXT, value BLOB);

-- what lies below `offset` was written before `at` and was `bytes` in all, kept only for topics with retention
CREATE TABLE marks(
  partition_id INTEGER NOT NULL, offset INTEGER NOT NULL, at INTEGER NOT NULL, bytes INTEGER NOT NULL,
  PRIMARY KEY(partition_id, offset)) WITHOUT ROWID;

CREATE TABLE identities(
  name TEXT PRIMARY KEY, epoch INTEGER NOT NULL, host TEXT NOT NULL, opened_at INTEGER NOT NULL) WITHOUT ROWID;

-- last: number of the last transaction that this writer committed. retired: it commits nothing more
CREATE TABLE writers(
  id TEXT PRIMARY KEY, identity TEXT, last INTEGER NOT NULL DEFAULT 0, used_at INTEGER NOT NULL,
  retired INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE INDEX writers_identity ON writers(identity) WHERE identity IS NOT NULL;

-- those with messages in the file before their end. state: open, prepared, aborting (decided, messages still there),
-- and of prepared ones for a while committed, aborted
CREATE TABLE transactions(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, identity TEXT, host TEXT NOT NULL,
  state TEXT NOT NULL, prepared INTEGER NOT NULL DEFAULT 0, begun_at INTEGER NOT NULL, deadline_at INTEGER NOT NULL,
  ended_at INTEGER, messages INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '');
CREATE INDEX transactions_ended ON transactions(ended_at);

-- offsets that are written and not decided, or not removed yet. Readers stop before a partition's first
CREATE TABLE undecided(
  partition_id INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, number INTEGER NOT NULL,
  PRIMARY KEY(partition_id, first)) WITHOUT ROWID;
CREATE INDEX undecided_number ON undecided(number);

CREATE TABLE groups(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, generation INTEGER NOT NULL DEFAULT 0,
  sharing TEXT NOT NULL);

CREATE TABLE members(
  id TEXT PRIMARY KEY, group_id INTEGER NOT NULL, topics TEXT NOT NULL, host TEXT NOT NULL,
  expires_at INTEGER NOT NULL, joined_at INTEGER NOT NULL) WITHOUT ROWID;

-- epoch grows whenever the partition is given to a member, also to the same one again
CREATE TABLE assignments(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, member TEXT, epoch INTEGER NOT NULL,
  wanted TEXT, wanted_since INTEGER, PRIMARY KEY(group_id, partition_id)) WITHOUT ROWID;

-- everything below next is acknowledged. rewinds grows when a prepared transaction's acknowledgements are aborted
CREATE TABLE positions(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, next INTEGER NOT NULL,
  rewinds INTEGER NOT NULL DEFAULT 0, PRIMARY KEY(group_id, partition_id)) WITHOUT ROWID;

-- acknowledged ranges beyond positions.next
CREATE TABLE acks(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
  PRIMARY KEY(group_id, partition_id, first)) WITHOUT ROWID;

-- what prepared transactions acknowledge: taken until they are decided
CREATE TABLE pending_acks(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
  number INTEGER NOT NULL, PRIMARY KEY(group_id, partition_id, first)) WITHOUT ROWID;
CREATE INDEX pending_acks_number ON pending_acks(number);

-- messages handed out in groups that share message by message
CREATE TABLE leases(
  group_id INTEGER NOT NULL, partition_id INTEGER NOT NULL, offset INTEGER NOT NULL, member TEXT,
  until INTEGER NOT NULL, deliveries INTEGER NOT NULL,
  PRIMARY KEY(group_id, partition_id, offset)) WITHOUT ROWID;

CREATE TABLE sequences(
  publisher TEXT NOT NULL, topic_id INTEGER NOT NULL, last INTEGER NOT NULL,
  PRIMARY KEY(publisher, topic_id)) WITHOUT ROWID;

CREATE TABLE logs(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
  first INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 0);

-- id: log << 40 | position
CREATE TABLE log_records(id INTEGER PRIMARY KEY, record BLOB NOT NULL);

-- state: waiting, parked, committed, aborted
CREATE TABLE halves(
  id INTEGER PRIMARY KEY AUTOINCREMENT, group_name TEXT NOT NULL, transaction_id TEXT NOT NULL,
  state TEXT NOT NULL, check_at INTEGER NOT NULL,
  deadline_at INTEGER NOT NULL, checks INTEGER NOT NULL DEFAULT 0, ended_at INTEGER,
  UNIQUE(group_name, transaction_id));
CREATE INDEX halves_due ON halves(group_name, check_at) WHERE state = 'waiting';

CREATE TABLE half_messages(
  half INTEGER NOT NULL, number INTEGER NOT NULL, topic TEXT NOT NULL, key BLOB, headers TEXT, value BLOB,
  partition INTEGER, timestamp INTEGER, PRIMARY KEY(half, number)) WITHOUT ROWID;
