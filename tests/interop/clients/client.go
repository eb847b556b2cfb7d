// Makes the calls of a plan with grpc-go; see tests/interop/plan.py.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"
)

// Messages are bytes here.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error { *v.(*[]byte) = data; return nil }
func (raw) Name() string                               { return "proto" }

func stream(conn *grpc.ClientConn, ctx context.Context, path string, message []byte, count int) ([][]byte, error) {
	call, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, path, grpc.ForceCodec(raw{}))
	if err != nil {
		return nil, err
	}
	for i := 0; i < count; i++ {
		if err := call.SendMsg(&message); err != nil {
			break
		}
	}
	call.CloseSend()
	var answers [][]byte
	for {
		var answer []byte
		if err := call.RecvMsg(&answer); err != nil {
			if err.Error() == "EOF" {
				err = nil
			}
			return answers, err
		}
		answers = append(answers, answer)
	}
}

func make_(conn *grpc.ClientConn, op, path string, message []byte, count, deadlineMs int) ([][]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(deadlineMs)*time.Millisecond)
	defer cancel()
	options := []grpc.CallOption{grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(1 << 30)}
	switch op {
	case "gzip":
		options = append(options, grpc.UseCompressor("gzip"))
	case "cancel":
		time.AfterFunc(time.Duration(count)*time.Millisecond, cancel)
	case "stream":
		return stream(conn, ctx, path, message, count)
	case "many":
		answers, errors := make([][]byte, count), make([]error, count)
		var group sync.WaitGroup
		for i := 0; i < count; i++ {
			group.Add(1)
			go func(i int) {
				defer group.Done()
				errors[i] = conn.Invoke(ctx, path, &message, &answers[i], options...)
			}(i)
		}
		group.Wait()
		for _, err := range errors {
			if err != nil {
				return answers, err
			}
		}
		return answers, nil
	}
	var answer []byte
	if err := conn.Invoke(ctx, path, &message, &answer, options...); err != nil {
		return nil, err
	}
	return [][]byte{answer}, nil
}

func main() {
	conn, err := grpc.Dial("127.0.0.1:"+os.Args[1], grpc.WithInsecure())
	if err != nil {
		panic(err)
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var op, path, file string
		var count, deadlineMs int
		fmt.Fscan(strings.NewReader(lines.Text()), &op, &path, &file, &count, &deadlineMs)
		message, err := os.ReadFile(file)
		if err != nil {
			panic(err)
		}
		answers, err := make_(conn, op, path, message, count, deadlineMs)
		if len(answers) > 0 {
			os.WriteFile(file+".answer", answers[0], 0o600)
		}
		found := status.Convert(err)
		fmt.Printf("%d %d %s\n", found.Code(), len(answers), hex.EncodeToString([]byte(found.Message())))
	}
}
