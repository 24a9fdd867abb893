// The part of the race test that works on files: threads that write, read, touch and remove the same objects.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "files.hpp"
#include "ring.hpp"

namespace ucm {

inline void require(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "stress: %s\n", what);
  std::_Exit(1);
}

// Objects of a few keys in one directory, each thread with memory of its own: what is read is whole and right,
// or absent.
class FileWorker {
public:
  static constexpr uint32_t kObjects = 6, kBatch = 3, kStride = 4096, kFileShards = 2;

  FileWorker(const ObjectFiles &files, std::string directory, uint64_t seed)
      : files_(files), directory_(std::move(directory)), seed_(seed), random_(seed) {
    for (auto &memory : memory_) memory.reset(static_cast<uint64_t *>(std::aligned_alloc(4096, kBytes)));
  }

  void run(Ring::Clock::time_point end) {
    while (Ring::Clock::now() < end) step();
  }

private:
  static constexpr uint64_t kBytes = kFileShards * kStride;

  void step() {
    Key keys[kBatch];
    int64_t payloads[kBatch];
    for (uint32_t i = 0; i < kBatch; ++i) {
      keys[i] = file_key((random_() + i) % kObjects);
      payloads[i] = reinterpret_cast<int64_t>(memory_[i].get());
    }
    const ObjectBatch batch{kBatch, reinterpret_cast<const unsigned char *>(keys), payloads};
    const uint64_t action = random_() % 8;
    if (action < 3) {
      write(batch, keys);
    } else if (action < 6) {
      read(batch, keys);
    } else if (action == 6) {
      look(batch);
    } else {
      unlink((directory_ + "/" + ObjectName(batch.key(0), "segment").path()).c_str());
    }
  }

  // The file's name has the first half of a key.
  static Key file_key(uint64_t number) { return {{number * 0x9E3779B97F4A7C15u, number, number, number + 1}}; }

  void write(const ObjectBatch &batch, const Key *keys) {
    std::vector<std::string> temporaries;
    for (uint32_t n = 0; n < kBatch; ++n) {
      for (uint64_t i = 0; i < kBytes / 8; ++i) memory_[n].get()[i] = keys[n].words[3] * (i | 1);
      temporaries.push_back("." + std::to_string(seed_) + "-" + std::to_string(number_++) + ".tmp");
    }
    int32_t results[kBatch];
    files_.write(batch, temporaries, false, false, results);
    for (const int32_t result : results) require(result == kOk, "a write failed");
  }

  void read(const ObjectBatch &batch, const Key *keys) {
    int32_t results[kBatch][kFileShards];
    files_.read(batch, {0, kFileShards}, random_() % 2 == 0, 0, results[0]);
    for (uint32_t n = 0; n < kBatch; ++n) {
      require(results[n][0] == kOk || results[n][0] == kMiss, "an object is damaged");
      for (uint64_t i = 0; results[n][0] == kOk && i < kBytes / 8; ++i)
        require(memory_[n].get()[i] == keys[n].words[3] * (i | 1), "an object shows bytes of another key");
    }
  }

  void look(const ObjectBatch &batch) {
    uint8_t found[kBatch];
    const NameRows names{kBatch, 32, batch.keys};
    files_.stat(names, 0, found);
    files_.touch(names, found);
  }

  struct Free {
    void operator()(uint64_t *memory) const { std::free(memory); }
  };
  const ObjectFiles &files_;
  const std::string directory_;
  const uint64_t seed_;
  std::mt19937_64 random_;
  uint64_t number_ = 0;
  std::unique_ptr<uint64_t, Free> memory_[kBatch];
};

inline void run_files(int seconds) {
  char name[] = "/tmp/ucm-stress-XXXXXX";
  const std::string directory = mkdtemp(name);
  const ObjectFormat format{{1}, {2}, FileWorker::kFileShards, FileWorker::kStride};
  for (const bool uring : {false, true}) {
    const ObjectFiles files(directory, "segment", format, uring);
    const auto end = Ring::Clock::now() + std::chrono::milliseconds(500 * seconds);
    std::vector<std::thread> threads;
    for (uint64_t seed = 0; seed < 4; ++seed)
      threads.emplace_back([&, seed] { FileWorker(files, directory, 10 * uring + seed).run(end); });
    for (std::thread &thread : threads) thread.join();
  }
  uint64_t left = 0;
  for (const auto &entry : std::filesystem::recursive_directory_iterator(directory))
    left += entry.is_regular_file() && entry.path().extension() == ".tmp";
  std::filesystem::remove_all(directory);
  require(left == 0, "temporaries are left");
}

}  // namespace ucm
