// Makes the calls of a plan with grpc-java; see tests/interop/plan.py.

import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.netty.NettyChannelBuilder;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

public class Client {
    // Messages are bytes here.
    static class Bytes implements MethodDescriptor.Marshaller<byte[]> {
        public InputStream stream(byte[] message) {
            return new ByteArrayInputStream(message);
        }

        public byte[] parse(InputStream stream) {
            try {
                return stream.readAllBytes();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    // One call under way: its answers and its end.
    static class Running extends ClientCall.Listener<byte[]> {
        final List<byte[]> answers = new ArrayList<>();
        final CountDownLatch over = new CountDownLatch(1);
        final ClientCall<byte[], byte[]> call;
        Status status;

        Running(ManagedChannel channel, String op, String path, byte[] message, int count,
                int deadlineMs) {
            boolean stream = op.equals("stream");
            MethodDescriptor<byte[], byte[]> method =
                MethodDescriptor.<byte[], byte[]>newBuilder()
                    .setType(stream ? MethodDescriptor.MethodType.BIDI_STREAMING
                                    : MethodDescriptor.MethodType.UNARY)
                    .setFullMethodName(path.substring(1))
                    .setRequestMarshaller(new Bytes())
                    .setResponseMarshaller(new Bytes())
                    .build();
            CallOptions options =
                CallOptions.DEFAULT.withDeadlineAfter(deadlineMs, TimeUnit.MILLISECONDS);
            if (op.equals("gzip")) {
                options = options.withCompression("gzip");
            }
            call = channel.newCall(method, options);
            call.start(this, new Metadata());
            call.request(Integer.MAX_VALUE);
            call.setMessageCompression(true);
            for (int i = 0; i < (stream ? count : 1); ++i) {
                call.sendMessage(message);
            }
            call.halfClose();
        }

        public void onMessage(byte[] answer) {
            answers.add(answer);
        }

        public void onClose(Status status, Metadata trailers) {
            this.status = status;
            over.countDown();
        }
    }

    public static void main(String[] arguments) throws Exception {
        ManagedChannel channel =
            NettyChannelBuilder.forAddress("127.0.0.1", Integer.parseInt(arguments[0]))
                .usePlaintext()
                .maxInboundMessageSize(1 << 30)
                .build();
        ScheduledExecutorService later = Executors.newSingleThreadScheduledExecutor();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null;) {
            String[] words = line.split(" ");
            String op = words[0], path = words[1], file = words[2];
            int count = Integer.parseInt(words[3]), deadlineMs = Integer.parseInt(words[4]);
            byte[] message = Files.readAllBytes(Path.of(file));
            List<Running> calls = new ArrayList<>();
            for (int i = 0; i < (op.equals("many") ? count : 1); ++i) {
                calls.add(new Running(channel, op, path, message, count, deadlineMs));
            }
            if (op.equals("cancel")) {
                later.schedule(() -> calls.get(0).call.cancel("no more of it", null), count,
                               TimeUnit.MILLISECONDS);
            }
            Status status = Status.OK;
            List<byte[]> answers = new ArrayList<>();
            for (Running one : calls) {
                one.over.await();
                answers.addAll(one.answers);
                status = one.status.isOk() ? status : one.status;
            }
            if (!answers.isEmpty()) {
                Files.write(Path.of(file + ".answer"), answers.get(0));
            }
            String text = status.getDescription() == null ? "" : status.getDescription();
            StringBuilder hex = new StringBuilder();
            for (byte one : text.getBytes(StandardCharsets.UTF_8)) {
                hex.append(String.format("%02x", one));
            }
            System.out.printf("%d %d %s%n", status.getCode().value(), answers.size(), hex);
        }
        later.shutdownNow();
        channel.shutdownNow();
        System.exit(0);
    }
}
