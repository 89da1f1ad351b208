// Opening, waiting, closing.

#include "api.h"
#include "levels.h"
#include "numa.h"

using namespace polysilicon;

// The levels of this build, best first, separated by commas.
PS_API void ps_levels(char* into, int size) {
  std::string names;
  for (int i = 0; i < kLevelCount; ++i) {
    if (i > 0) names += ',';
    names += kLevels[i].kernels->name;
  }
  std::snprintf(into, static_cast<std::size_t>(size), "%s", names.c_str());
}

// Whether processor and operating system have what a level needs.
PS_API bool ps_level_supported(const char* name) {
  for (int i = 0; i < kLevelCount; ++i) {
    if (std::strcmp(kLevels[i].kernels->name, name) == 0) return kLevels[i].supported();
  }
  return false;
}

// cpus: where each thread is pinned, or null. nodes: as for Interleaving.
PS_API Device* ps_device_open(const char* level, int threads, const int* cpus, bool deterministic,
                              ErrorText* error, std::uint64_t nodes) {
  return guarded<Device*>(error, nullptr, [&] {
    const Kernels* kernels = find_level(level);
    if (kernels == nullptr) throw Error(std::string("this processor has no level ") + level);
    const std::vector<int> places =
        cpus == nullptr ? std::vector<int>{} : std::vector<int>(cpus, cpus + threads);
    const Interleaving interleaving(nodes);
    return new Device(kernels, threads, places, deterministic);
  });
}

// Calls that have not begun are dropped.
PS_API void ps_device_close(Device* device) { delete device; }

PS_API std::size_t ps_device_workspace(const Device* device) {
  return device->context.workspace_bytes() + device->tokens.size();
}

PS_API bool ps_done(Device* device, Queue::Ticket ticket) { return device->queue.done(ticket); }

PS_API bool ps_wait(Device* device, Queue::Ticket ticket, ErrorText* error) {
  return guarded(error, false, [&] {
    const Failure failure = device->queue.wait(ticket);
    if (failure.status != Status::kOk) set_error(error, failure);
    return failure.status == Status::kOk;
  });
}
