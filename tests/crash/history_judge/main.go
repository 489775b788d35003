// Is a history of appends and reads that of one log? Porcupine decides; here is only what a log does.
//
// Input: a JSON object per line, {"client", "start", "end", "kind": "append", "value", "offset"} or
// {..., "kind": "read", "count", "chain"}; a chain is the hash of the chain before it and the next value.
// Exits 0 for a linearizable history, 1 for another, 2 if it can't tell in time.
package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

type line struct {
	Client             int
	Start, End         int64
	Kind, Value, Chain string
	Offset, Count      int
}

type state struct {
	count int
	chain string
}

func next(chain, value string) string {
	sum := sha256.Sum256([]byte(chain + value))
	return hex.EncodeToString(sum[:8])
}

var model = porcupine.Model{
	Init: func() interface{} { return state{} },
	Step: func(before, input, _ interface{}) (bool, interface{}) {
		log, op := before.(state), input.(line)
		if op.Kind == "append" {
			return op.Offset == log.count, state{log.count + 1, next(log.chain, op.Value)}
		}
		return op.Count == log.count && op.Chain == log.chain, log
	},
}

func main() {
	var history []porcupine.Operation
	scanner := bufio.NewScanner(os.Stdin)
	for scanner.Scan() {
		var op line
		if err := json.Unmarshal(scanner.Bytes(), &op); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		history = append(history, porcupine.Operation{ClientId: op.Client, Input: op, Call: op.Start, Return: op.End})
	}
	result := porcupine.CheckOperationsTimeout(model, history, time.Minute)
	fmt.Println(result, len(history), "operations")
	os.Exit(map[porcupine.CheckResult]int{porcupine.Ok: 0, porcupine.Illegal: 1, porcupine.Unknown: 2}[result])
}
