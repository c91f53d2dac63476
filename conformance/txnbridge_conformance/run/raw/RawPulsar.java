import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.transaction.Transaction;

/** The role "write" of a raw run on Pulsar: random transactions by Pulsar's Java client, recorded as a history. */
public class RawPulsar {
    private static final int LARGEST_PART = 20;

    private final HistoryRecorder history;
    private final String process;
    private final long timeout;
    private final Random random;
    private final PulsarClient client;
    private final List<String[]> keys = new ArrayList<>(); // topic and number of each partition
    private final Map<String, Producer<byte[]>> producers = new HashMap<>();
    private int values = 0;
    private volatile boolean stopped = false;

    private RawPulsar(String[] arguments) throws Exception {
        history = new HistoryRecorder(Path.of(arguments[0]), arguments[1], "pulsar-client (Java)");
        process = arguments[1];
        timeout = Long.parseLong(arguments[3]);
        random = new Random(Long.parseLong(arguments[4]));
        for (int at = 6; at < arguments.length; at++) {
            for (int partition = 0; partition < Integer.parseInt(arguments[5]); partition++) {
                keys.add(new String[] {arguments[at], String.valueOf(partition)});
            }
        }
        int opening = history.start("open");
        client = PulsarClient.builder().serviceUrl(arguments[2]).enableTransaction(true)
                .operationTimeout((int) timeout, TimeUnit.MILLISECONDS).build();
        history.end(opening, "ok");
    }

    public static void main(String[] arguments) throws Exception {
        RawPulsar program = new RawPulsar(arguments);
        Thread main = Thread.currentThread();
        ProcessHandle.current().parent().ifPresent(run -> run.onExit().thenRun(() -> Runtime.getRuntime().halt(1)));
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            program.stopped = true;
            try {
                main.join(program.timeout * 2);
            } catch (InterruptedException error) {
                // the process ends anyway
            }
        }));
        while (!program.stopped) {
            program.transact();
            Thread.sleep(program.random.nextInt(20));
        }
        Runtime.getRuntime().halt(0);
    }

    private void transact() throws Exception {
        int call = history.start("transaction", "deadline", timeout / 1000);
        Transaction txn = null;
        try {
            txn = client.newTransaction().withTransactionTimeout(timeout, TimeUnit.MILLISECONDS).build()
                    .get(timeout, TimeUnit.MILLISECONDS);
            history.note(call, "transaction", txn.getTxnID());
            send(call, txn);
            if (random.nextInt(4) == 0) {
                txn.abort().get(timeout, TimeUnit.MILLISECONDS);
                history.end(call, "fail", "error", "Abort");
                return;
            }
        } catch (Exception error) {
            abort(txn);
            history.end(call, "fail", "error", error.getClass().getSimpleName());
            return;
        }
        try {
            txn.commit().get(timeout, TimeUnit.MILLISECONDS);
            history.end(call, "ok");
        } catch (Exception error) {
            history.end(call, "unknown", "error", error.getClass().getSimpleName());
        }
    }

    private void send(int call, Transaction txn) throws Exception {
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        Collections.shuffle(keys, random);
        for (String[] key : keys.subList(0, 1 + random.nextInt(keys.size()))) {
            List<String> part = new ArrayList<>();
            for (int count = 1 + random.nextInt(LARGEST_PART); count > 0; count--) {
                part.add(process + "/" + values++);
            }
            history.send(call, key[0], Integer.parseInt(key[1]), part);
            Producer<byte[]> producer = producer(key);
            for (String value : part) {
                sent.add(producer.newMessage(txn).value(value.getBytes(StandardCharsets.UTF_8)).sendAsync());
            }
        }
        CompletableFuture.allOf(sent.toArray(new CompletableFuture[0])).get(timeout, TimeUnit.MILLISECONDS);
    }

    private Producer<byte[]> producer(String[] key) throws Exception {
        String name = "persistent://public/default/" + key[0] + "-partition-" + key[1];
        Producer<byte[]> known = producers.get(name);
        if (known == null) {
            known = client.newProducer().topic(name).sendTimeout(0, TimeUnit.SECONDS).createAsync()
                    .get(timeout, TimeUnit.MILLISECONDS);
            producers.put(name, known);
        }
        return known;
    }

    private void abort(Transaction txn) {
        try {
            if (txn != null) {
                txn.abort().get(timeout, TimeUnit.MILLISECONDS);
            }
        } catch (Exception error) {
            // the broker aborts it when its time is over
        }
    }
}
