// CUDA C++ on the CPU, for tests: how a launch is run. One block after another; a block's threads are fibers, each of
// which runs until it waits. Launches take turns to go through blocks, warps and lanes from the first to the last, from the
// last to the first, and scattered, each time otherwise, so that what depends on their order shows.
#include "races.hpp"
#include "shim.hpp"

#include <cstdarg>
#include <cstdio>
#include <numeric>
#include <sys/mman.h>
#include <vector>

// void octavo_shim_switch(void **save, void *load): goes on where another stack stopped.
#if defined(__x86_64__)
asm(R"(
.text
.globl octavo_shim_switch
.type octavo_shim_switch, @function
octavo_shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size octavo_shim_switch, . - octavo_shim_switch
)");
static const size_t SAVED_WORDS = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl octavo_shim_switch
.type octavo_shim_switch, %function
octavo_shim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp d8, d9, [sp, #80]
    stp d10, d11, [sp, #96]
    stp d12, d13, [sp, #112]
    stp d14, d15, [sp, #128]
    stp x29, x30, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp d8, d9, [sp, #80]
    ldp d10, d11, [sp, #96]
    ldp d12, d13, [sp, #112]
    ldp d14, d15, [sp, #128]
    ldp x29, x30, [sp, #144]
    add sp, sp, #160
    ret
.size octavo_shim_switch, . - octavo_shim_switch
)");
#else
#error "the shim knows how to switch stacks on x86-64 and aarch64 only"
#endif
extern "C" void octavo_shim_switch(void **save, void *load);

namespace shim {

__thread Thread *thread;
__thread Block *block;

namespace {

const size_t STACK_BYTES = 128 << 10;
const size_t MOST_THREADS = 1024;
const size_t MOST_SHARED = 99 << 10; // of a block, where there is least: compute capability 8.6, 8.9 and 12.0
const unsigned MOST_BLOCKS = 65535; // in y and z
const int POISON = 0xff;

enum class State { Ready, AtBarrier, InWarp, Ended };

struct Copy {
    void *to;
    const void *from;
    size_t bytes;
};

struct Fiber : Thread {
    void *stack_pointer;
    State state;
    const char *waits_for;
    int line;
    void *slot;
    std::vector<Copy> copies; // the group that is open, after all that are closed
    std::vector<size_t> groups; // where the closed groups end
};

struct Array {
    const void *site;
    size_t at, bytes;
};

// In which order `count` things come: number `i` is `at(i)`.
struct Order {
    size_t count, first, step;
    Order() = default;
    Order(size_t count, size_t launch) : count(count), first(0), step(1) {
        if (launch % 3 == 2) first = count - 1, step = count - 1;
        if (launch % 3 != 0) return;
        uint64_t seed = launch * 0x9e3779b97f4a7c15;
        first = (seed >> 32) % count, step = (seed >> 16) % count;
        while (std::gcd(step, count) != 1) step++;
    }
    size_t at(size_t i) const { return (first + i * step) % count; }
};

struct Launch {
    const Kernel *kernel;
    const Argument *arguments;
    size_t dynamic_bytes;
    char *message;
    size_t message_bytes;
    bool failed;
    Order blocks, warps, lanes;
};

// What one thread of the host needs to run launches; taken once.
struct Machine {
    std::vector<Fiber> fibers;
    char *stacks;
    void *scheduler; // its stack pointer while a fiber runs
    std::vector<char> shared;
    size_t shared_used, threads;
    std::vector<Array> arrays;
    unsigned arrived[MOST_THREADS / 32]; // lanes of each warp that wait in `warp`
    Block block;
    Launch *launch;
    Fiber *current;
    Races races; // on shared memory

    Machine() : fibers(MOST_THREADS), shared(MOST_SHARED + 16), shared_used(0) {
        // Pages are taken when they are touched.
        stacks = static_cast<char *>(mmap(nullptr, STACK_BYTES * MOST_THREADS, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stacks == MAP_FAILED) abort();
        races.watch(shared_begin(), MOST_SHARED);
    }
    ~Machine() { munmap(stacks, STACK_BYTES * MOST_THREADS); }
    char *shared_begin() {
        auto at = reinterpret_cast<uintptr_t>(shared.data());
        return shared.data() + (-at % 16);
    }
};

Machine &machine() {
    thread_local Machine machine;
    return machine;
}
__thread Machine *now;

void to_scheduler() {
    Fiber *fiber = now->current;
    octavo_shim_switch(&fiber->stack_pointer, now->scheduler);
}

// Waits: the next lane of the warp that can run does, or else the scheduler decides.
void pass_on() {
    Fiber &fiber = *now->current;
    Fiber *lanes = &now->fibers[fiber.number / 32 * 32];
    unsigned lane = fiber.number % 32, step = unsigned(now->launch->lanes.step);
    for (int i = 1; i < 32; i++) {
        Fiber &next = lanes[lane = (lane + step) % 32];
        if (next.state != State::Ready) continue;
        now->current = &next;
        thread = &next;
        return octavo_shim_switch(&fiber.stack_pointer, next.stack_pointer);
    }
    to_scheduler();
}

void fiber_main() {
    now->launch->kernel->run(now->launch->kernel, now->launch->arguments);
    if (!now->current->copies.empty()) fail("ends with asynchronous copies that nobody waited for");
    now->current->state = State::Ended;
    pass_on();
    __builtin_unreachable();
}

void make_ready(Fiber &fiber, size_t number) {
    // Not all at the same distance from a large power of two, where they would share a few lines of the cache.
    char *top = now->stacks + (number + 1) * STACK_BYTES - number % 64 * 448;
    auto words = reinterpret_cast<void **>(top) - 2;
#if defined(__x86_64__)
    *--words = nullptr; // where fiber_main would return to; keeps its stack aligned as after a call
    *--words = reinterpret_cast<void *>(fiber_main);
    words -= SAVED_WORDS;
#else
    words -= 20;
    words[19] = reinterpret_cast<void *>(fiber_main);
#endif
    fiber.stack_pointer = words;
    fiber.state = State::Ready;
    fiber.number = unsigned(number);
    auto size = now->block.size;
    fiber.index = {unsigned(number) % size.x, unsigned(number) / size.x % size.y, unsigned(number) / size.x / size.y};
    fiber.copies.clear();
    fiber.groups.clear();
}

void run_fiber(Fiber &fiber) {
    now->current = &fiber;
    thread = &fiber;
    octavo_shim_switch(&now->scheduler, fiber.stack_pointer);
}

// Runs the fibers of one warp until none of them can go on.
void run_warp(size_t first) {
    for (bool progress = true; progress && !now->launch->failed;) {
        progress = false;
        for (size_t i = 0; i < 32 && !now->launch->failed; i++) {
            Fiber &fiber = now->fibers[first + now->launch->lanes.at(i)];
            if (fiber.state != State::Ready) continue;
            run_fiber(fiber);
            progress = true;
        }
    }
}

void blame(const Fiber &fiber, const char *format, ...) __attribute__((format(printf, 2, 3)));

// When nobody can go on: lets all go on past a barrier, or says why they cannot.
bool release() {
    Fiber *fibers = now->fibers.data();
    size_t ended = 0;
    const Fiber *waiting = nullptr;
    for (size_t i = 0; i < now->threads; i++) {
        const Fiber &fiber = fibers[i];
        if (fiber.state == State::Ended) {
            ended++;
        } else if (fiber.state == State::InWarp) {
            blame(fiber, "waits in %s (line %d) for lanes of its warp that do not come", fiber.waits_for, fiber.line);
            return false;
        } else if (!waiting) {
            waiting = &fiber;
        } else if (fiber.line != waiting->line) {
            blame(fiber, "a divergent barrier: it waits at line %d, thread %u at line %d", fiber.line, waiting->number,
                  waiting->line);
            return false;
        }
    }
    if (!waiting) return false;
    if (ended > 0) {
        blame(*waiting, "a divergent barrier: it waits at line %d, and %zu threads have ended", waiting->line, ended);
        return false;
    }
    for (size_t i = 0; i < now->threads; i++) fibers[i].state = State::Ready;
    now->races.at_barrier();
    return true;
}

void run_block() {
    now->arrays.clear();
    std::memset(now->arrived, 0, sizeof now->arrived);
    std::memset(now->shared_begin(), POISON, now->shared_used);
    now->shared_used = (now->launch->dynamic_bytes + 15) / 16 * 16;
    std::memset(now->shared_begin(), POISON, now->shared_used);
    for (size_t i = 0; i < now->threads; i++) make_ready(now->fibers[i], i);
    now->races.at_barrier();
    do {
        for (size_t i = 0; i < now->launch->warps.count && !now->launch->failed; i++) {
            run_warp(32 * now->launch->warps.at(i));
        }
    } while (!now->launch->failed && release());
}

void say(const Fiber *fiber, const char *format, va_list arguments) {
    Launch &launch = *now->launch;
    if (launch.failed) return;
    launch.failed = true;
    int used = fiber ? snprintf(launch.message, launch.message_bytes, "kernel %s, block (%u, %u, %u), thread %u: ",
                                launch.kernel->name, now->block.index.x, now->block.index.y, now->block.index.z,
                                fiber->number)
                     : snprintf(launch.message, launch.message_bytes, "kernel %s: ", launch.kernel->name);
    if (used > 0 && size_t(used) < launch.message_bytes) {
        vsnprintf(launch.message + used, launch.message_bytes - used, format, arguments);
    }
}

void blame(const Fiber &fiber, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(&fiber, format, arguments);
    va_end(arguments);
}

__attribute__((format(printf, 1, 2))) void refuse(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(nullptr, format, arguments);
    va_end(arguments);
}

bool fits(const Launch &launch, size_t count) {
    const Kernel &kernel = *launch.kernel;
    static const char *const names[] = {"a pointer", "an integer", "a float"};
    if (now->threads == 0 || now->threads % 32 || now->threads > kernel.max_threads) {
        refuse("blocks of %zu threads: they are whole warps, up to %u threads", now->threads, kernel.max_threads);
    } else if (count != kernel.parameters) {
        refuse("%zu arguments for %zu parameters", count, kernel.parameters);
    } else if (now->block.grid.y > MOST_BLOCKS || now->block.grid.z > MOST_BLOCKS) {
        refuse("%u × %u blocks in y and z: there are at most %u each", now->block.grid.y, now->block.grid.z, MOST_BLOCKS);
    } else if (launch.dynamic_bytes > MOST_SHARED) {
        refuse("%zu bytes of shared memory: there are at most %zu", launch.dynamic_bytes, MOST_SHARED);
    }
    for (size_t i = 0; i < count && !launch.failed; i++) {
        uint32_t want = kernel.kinds[i], got = launch.arguments[i].kind;
        if (want != got) refuse("argument %zu should be %s and is %s", i, names[want], names[got]);
    }
    return !launch.failed;
}

} // namespace

Kernel *&Kernel::all() {
    static Kernel *first = nullptr;
    return first;
}

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say(now->current, format, arguments);
    va_end(arguments);
    // The launch is over: nobody comes back to this stack.
    to_scheduler();
    __builtin_unreachable();
}

void barrier(int line) {
    Fiber &fiber = *now->current;
    fiber.state = State::AtBarrier;
    fiber.line = line;
    pass_on();
}

void warp(const char *what, int line, void *slot, void (*meet)(void *const *slots), bool orders_memory) {
    Fiber &fiber = *now->current;
    fiber.state = State::InWarp;
    fiber.waits_for = what;
    fiber.line = line;
    fiber.slot = slot;
    unsigned &arrived = now->arrived[fiber.number / 32];
    if (++arrived < 32) return pass_on();
    arrived = 0;
    Fiber *lanes = &now->fibers[fiber.number / 32 * 32];
    void *slots[32];
    for (int i = 0; i < 32; i++) {
        const Fiber &lane = lanes[i];
        if (lane.line != line || lane.waits_for != what) {
            fail("is in %s (line %d), and lane %d of its warp in %s (line %d)", what, line, i, lane.waits_for, lane.line);
        }
        slots[i] = lane.slot;
    }
    meet(slots);
    if (orders_memory) now->races.at_warp_barrier(fiber.number / 32);
    for (int i = 0; i < 32; i++) lanes[i].state = State::Ready;
}

void *shared_array(const void *site, size_t bytes) {
    for (const Array &array : now->arrays) {
        if (array.site == site) return now->shared_begin() + array.at;
    }
    size_t at = now->shared_used, end = at + (bytes + 15) / 16 * 16;
    if (end > MOST_SHARED) fail("%zu bytes of shared memory: there are at most %zu", end, MOST_SHARED);
    std::memset(now->shared_begin() + at, POISON, end - at);
    now->arrays.push_back({site, at, bytes});
    now->shared_used = end;
    return now->shared_begin() + at;
}

void *dynamic_shared(size_t *bytes) {
    *bytes = now->launch->dynamic_bytes;
    return now->shared_begin();
}

void touch(Touch kind, const void *at, size_t bytes) {
    now->races.touch(kind, now->current->number, at, bytes, [&](size_t byte, const char *does, uint32_t tag) {
        static const char *const names[] = {"reads", "writes", "atomically changes", "copies to", "copies to"};
        char text[32];
        fail("a race: it %s byte %zu of shared memory, which %s %s, and no barrier is between", names[int(kind)], byte,
             Races::words(tag, text, sizeof text), does);
    });
}

void copy_later(void *to, const void *from, size_t bytes) {
    touch(Touch::Copy, to, bytes);
    std::memset(to, POISON, bytes);
    now->current->copies.push_back({to, from, bytes});
}

void commit_copies() { now->current->groups.push_back(now->current->copies.size()); }

void wait_copies(unsigned groups_left) {
    Fiber &fiber = *now->current;
    if (fiber.groups.size() <= groups_left) return;
    size_t groups = fiber.groups.size() - groups_left, copies = fiber.groups[groups - 1];
    for (size_t i = 0; i < copies; i++) {
        const Copy &copy = fiber.copies[i];
        touch(Touch::Copied, copy.to, copy.bytes);
        copy.from ? void(std::memcpy(copy.to, copy.from, copy.bytes)) : void(std::memset(copy.to, 0, copy.bytes));
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + copies);
    fiber.groups.erase(fiber.groups.begin(), fiber.groups.begin() + groups);
    for (size_t &end : fiber.groups) end -= copies;
}

} // namespace shim

extern "C" const shim::Kernel *octavo_shim_kernel(const char *name) {
    for (const shim::Kernel *kernel = shim::Kernel::all(); kernel; kernel = kernel->next) {
        if (!strcmp(kernel->name, name)) return kernel;
    }
    return nullptr;
}

// Runs launch number `number`, from 1. 0, or 1 with a message.
extern "C" int octavo_shim_launch(const shim::Kernel *kernel, dim3 grid, dim3 size, size_t dynamic_bytes,
                                  const shim::Argument *arguments, size_t count, size_t number, char *message,
                                  size_t message_bytes) {
    using namespace shim;
    Launch launch{kernel, arguments, dynamic_bytes, message, message_bytes, false, {}, {}, {}};
    now = &machine();
    now->launch = &launch;
    now->current = nullptr;
    now->block = {{0, 0, 0}, size, grid};
    now->threads = size_t(size.x) * size.y * size.z;
    block = &now->block;
    if (!fits(launch, count)) return 1;
    launch.blocks = {size_t(grid.x) * grid.y * grid.z, number};
    launch.warps = {now->threads / 32, number};
    launch.lanes = {32, number};
    for (size_t i = 0; i < launch.blocks.count && !launch.failed; i++) {
        size_t at = launch.blocks.at(i);
        now->block.index = {unsigned(at % grid.x), unsigned(at / grid.x % grid.y), unsigned(at / grid.x / grid.y)};
        run_block();
    }
    if (launch.failed) now->races.forget();
    return launch.failed;
}
