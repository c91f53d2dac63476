import java.io.FileOutputStream;
import java.io.IOException;
import java.net.InetAddress;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Appends the history of one process to a file, as JSON lines that `txnbridge conformance check` reads. Any thread may
 * use it. Each line is written by one system call, so that a killed process has recorded all that it did.
 *
 * <p>Start a call before the first request to the broker. Fields are given as names and values in turn.
 */
public final class HistoryRecorder implements AutoCloseable {
    private static final int VERSION = 1;
    private static final Path KERNEL = Path.of("/proc/sys/kernel");

    private final FileOutputStream file;
    private final AtomicInteger calls = new AtomicInteger();

    /** Creates the file. `process` is the process's name in the run, `client` the library that it uses. */
    public HistoryRecorder(Path path, String process, String client) throws IOException {
        file = new FileOutputStream(Files.createFile(path).toFile());
        write("history", VERSION, "process", process, "client", client, "host", host(),
                "pid", ProcessHandle.current().pid());
    }

    /** Records that a call begins, such as "transaction"; returns its number. */
    public int start(String what, Object... fields) throws IOException {
        int call = calls.getAndIncrement();
        timed(joined(new Object[] {"start", call, "what", what}, fields));
        return call;
    }

    /** Records fields that were not known when the call began, such as the transaction's id. */
    public void note(int call, Object... fields) throws IOException {
        write(joined(new Object[] {"note", call}, fields));
    }

    /** Records values that the call is about to send to a partition, in their order. */
    public void send(int call, String topic, int partition, List<String> values) throws IOException {
        write("send", call, "to", List.of(topic, partition), "values", values);
    }

    /** Records the positions, each a list of numbers, at which the broker stored these values. */
    public void stored(int call, String topic, int partition, List<String> values, List<List<Long>> positions)
            throws IOException {
        write("stored", call, "to", List.of(topic, partition), "values", values, "positions", positions);
    }

    /** Records messages that the call received, each as [topic, partition, position, value]; `group` may be null. */
    public void poll(int call, String group, List<List<Object>> messages) throws IOException {
        write("poll", call, "group", group, "messages", messages);
    }

    /** Records that the call is about to acknowledge the messages with these values. */
    public void ack(int call, String group, List<String> values) throws IOException {
        write("ack", call, "group", group, "values", values);
    }

    /** Records that the call ended: "ok" if it took effect, "fail" if it certainly did not, otherwise "unknown". */
    public void end(int call, String result, Object... fields) throws IOException {
        timed(joined(new Object[] {"end", call, "result", result}, fields));
    }

    /** Records that a fault, such as "kill", begins or ends ("begin", "end") at its target, such as a process. */
    public void fault(String kind, String target, String phase) throws IOException {
        timed("fault", kind, "target", target, "phase", phase);
    }

    @Override
    public void close() throws IOException {
        file.close();
    }

    private synchronized void timed(Object... fields) throws IOException {
        write(joined(fields, "mono", System.nanoTime())); // inside the lock, so that no older time is written later
    }

    private synchronized void write(Object... fields) throws IOException {
        StringBuilder line = new StringBuilder("{");
        for (int at = 0; at < fields.length; at += 2) {
            line.append(at == 0 ? "" : ",").append(json(fields[at])).append(':').append(json(fields[at + 1]));
        }
        file.write(line.append("}\n").toString().getBytes(StandardCharsets.UTF_8));
    }

    private static Object[] joined(Object[] first, Object... more) {
        Object[] all = java.util.Arrays.copyOf(first, first.length + more.length);
        System.arraycopy(more, 0, all, first.length, more.length);
        return all;
    }

    private static String json(Object value) {
        if (value == null || value instanceof Number || value instanceof Boolean) {
            return String.valueOf(value);
        }
        if (value instanceof List) {
            StringBuilder list = new StringBuilder("[");
            for (Object each : (List<?>) value) {
                list.append(list.length() == 1 ? "" : ",").append(json(each));
            }
            return list.append(']').toString();
        }
        StringBuilder text = new StringBuilder("\"");
        for (char each : value.toString().toCharArray()) {
            if (each == '"' || each == '\\') {
                text.append('\\').append(each);
            } else if (each < ' ' || Character.isSurrogate(each)) {
                text.append(String.format("\\u%04x", (int) each));
            } else {
                text.append(each);
            }
        }
        return text.append('"').toString();
    }

    /** Returns the name of this host and, on Linux, the id of its boot, because each boot has a clock of its own. */
    private static String host() throws IOException {
        if (!Files.exists(KERNEL)) {
            return InetAddress.getLocalHost().getHostName();
        }
        String name = Files.readString(KERNEL.resolve("hostname")).strip();
        return name + " " + Files.readString(KERNEL.resolve("random/boot_id")).strip();
    }
}
