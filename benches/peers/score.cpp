// Answers questions about a GGUF model with llama.cpp's library, one line of JSON for each line of standard input.
//
//   llama-score MODEL.gguf THREADS CONTEXT
//
//   info                 {"vocab": 49152, "bos": 1, "add_bos": false}
//   tokenize FILE        [ids], with the tokens that llama.cpp puts around a text, and with special tokens recognised
//   score ID ID ..       [negative log-likelihood of each token behind the first, in nats]
//   greedy N ID ID ..    {"ids": [N tokens], "second": [the second best of each], "margin": [the best logit less the second]}
//
// build_llama.sh builds it.
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

using Ids = std::vector<llama_token>;

static void fail(const std::string & what) {
    fprintf(stderr, "llama-score: %s\n", what.c_str());
    exit(1);
}

template <typename T> static void print(const std::vector<T> & all, const char * format) {
    printf("[");
    for (size_t i = 0; i < all.size(); i++) {
        printf(i ? ", " : "");
        printf(format, all[i]);
    }
    printf("]");
}

struct Scorer {
    llama_model * model;
    const llama_vocab * vocab;
    llama_context * context;
    int n_vocab;
    int n_context;
    int position = 0;

    // Appends tokens. The logits of every one of them are kept, or those of the last one.
    void append(const Ids & ids, bool all) {
        if (position + int(ids.size()) > n_context) fail("more tokens than the context holds");
        for (auto id : ids) {
            if (id < 0 || id >= n_vocab) fail("token " + std::to_string(id) + " is not in the vocabulary");
        }
        llama_batch batch = llama_batch_init(int(ids.size()), 0, 1);
        for (auto id : ids) {
            const int i = batch.n_tokens++;
            batch.token[i] = id;
            batch.pos[i] = position++;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = all || i + 1 == int(ids.size());
        }
        if (llama_decode(context, batch)) fail("llama_decode failed");
        llama_batch_free(batch);
    }

    void clear() {
        llama_memory_clear(llama_get_memory(context), true);
        position = 0;
    }

    Ids tokenize(const std::string & text) {
        const int n = -llama_tokenize(vocab, text.data(), int(text.size()), nullptr, 0, true, true);
        Ids ids(std::max(n, 0));
        if (llama_tokenize(vocab, text.data(), int(text.size()), ids.data(), n, true, true) != n) fail("cannot tokenize");
        return ids;
    }

    std::vector<double> score(const Ids & ids) {
        clear();
        append(ids, true);
        std::vector<double> nll;
        for (size_t i = 0; i + 1 < ids.size(); i++) {
            const float * row = llama_get_logits_ith(context, int(i));
            const double max = *std::max_element(row, row + n_vocab);
            double sum = 0;
            for (int k = 0; k < n_vocab; k++) sum += std::exp(row[k] - max);
            nll.push_back(max + std::log(sum) - row[ids[i + 1]]);
        }
        return nll;
    }

    void greedy(int n, const Ids & prompt) {
        clear();
        append(prompt, false);
        Ids best, second;
        std::vector<double> margin;
        while (int(best.size()) < n) {
            const float * row = llama_get_logits_ith(context, -1);
            int a = 0, b = -1;
            for (int k = 1; k < n_vocab; k++) {
                if (row[k] > row[a]) { b = a; a = k; }
                else if (b < 0 || row[k] > row[b]) b = k;
            }
            best.push_back(a);
            second.push_back(b);
            margin.push_back(row[a] - row[b]);
            if (int(best.size()) < n) append({ a }, false);
        }
        printf("{\"ids\": ");
        print(best, "%d");
        printf(", \"second\": ");
        print(second, "%d");
        printf(", \"margin\": ");
        print(margin, "%.6f");
        printf("}\n");
    }
};

int main(int argc, char ** argv) {
    if (argc != 4) fail("MODEL.gguf THREADS CONTEXT");
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    Scorer s;
    s.model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!s.model) fail(std::string(argv[1]) + ": cannot be loaded");
    s.vocab = llama_model_get_vocab(s.model);
    s.n_vocab = llama_vocab_n_tokens(s.vocab);
    s.n_context = atoi(argv[3]);
    auto params = llama_context_default_params();
    params.n_ctx = params.n_batch = s.n_context;
    params.n_threads = params.n_threads_batch = atoi(argv[2]);
    s.context = llama_init_from_model(s.model, params);
    if (!s.context) fail("no context");

    for (std::string line; std::getline(std::cin, line); fflush(stdout)) {
        std::istringstream words(line);
        std::string command;
        words >> command;
        auto ids = [&] {
            Ids ids;
            for (llama_token id; words >> id;) ids.push_back(id);
            if (ids.empty()) fail("no token: " + line);
            return ids;
        };
        if (command == "info") {
            printf("{\"vocab\": %d, \"bos\": %d, \"add_bos\": %s}\n", s.n_vocab, llama_vocab_bos(s.vocab),
                llama_vocab_get_add_bos(s.vocab) ? "true" : "false");
        } else if (command == "tokenize") {
            const std::string path = line.substr(line.find(' ') + 1);
            std::ifstream file(path, std::ios::binary);
            if (!file) fail(path + ": cannot be read");
            std::stringstream text;
            text << file.rdbuf();
            print(s.tokenize(text.str()), "%d");
            printf("\n");
        } else if (command == "score") {
            print(s.score(ids()), "%.9g");
            printf("\n");
        } else if (command == "greedy") {
            int n = 0;
            words >> n;
            s.greedy(n, ids());
        } else {
            fail("unknown: " + line);
        }
    }
}
