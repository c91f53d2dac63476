// What RocketMQ's own client for Java does beside ours: a name server's address, and a topic.
// Each line asks for transactions of one message: ["write", threads, so many by each of them, bytes of a message].

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.Scanner;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

public class RocketMQWriter {
    static class Committing implements TransactionListener {
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }

        // What is asked about is on its way to its end.
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.UNKNOW;
        }
    }

    public static void main(String[] where) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer("bench-java");
        producer.setNamesrvAddr(where[0]);
        producer.setTransactionListener(new Committing());
        producer.start();
        ExecutorService pool = Executors.newCachedThreadPool();
        BufferedReader asked = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = asked.readLine()) != null; ) {
            Scanner numbers = new Scanner(line.replaceAll("\\D+", " "));
            int threads = numbers.nextInt();
            int each = numbers.nextInt();
            byte[] body = new byte[numbers.nextInt()];
            List<Callable<Void>> work = new ArrayList<>();
            for (int thread = 0; thread < threads; thread++) {
                work.add(() -> {
                    for (int number = 0; number < each; number++) {
                        TransactionSendResult sent = producer.sendMessageInTransaction(new Message(where[1], body), null);
                        if (sent.getLocalTransactionState() != LocalTransactionState.COMMIT_MESSAGE) {
                            throw new IllegalStateException("not committed: " + sent);
                        }
                    }
                    return null;
                });
            }
            for (Future<Void> done : pool.invokeAll(work)) {
                done.get();
            }
            System.out.println(threads * each);
        }
        System.exit(0);
    }
}
