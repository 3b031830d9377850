// The machine code in backends/executor/starter.py (`_CODE`), from which the tests assemble it again.

.section start, "ax"
    // x0: moves, x1: argv, x2: envp, x3: call. System calls overwrite x0 only.
    mov x9, x0
    mov x10, x1
    mov x11, x2
    mov x12, x3
    ldp x8, x0, [x12]       // clone() or clone3()
    ldr x1, [x12, 16]
    svc 0
    cbnz x0, back
    ldr x0, [x12, 24]       // write(tasks, "0", 1)
    add x1, x12, 32
    mov x2, 1
    mov x8, 64
    svc 0
    ldr x2, [x12, 40]       // if (filter && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter)) exit
    cbz x2, filtered
    mov x0, 22
    mov x1, 2
    mov x8, 167
    svc 0
    cbnz w0, failed
filtered:
    mov x8, 157             // setsid()
    svc 0
    mov x0, -100            // openat(AT_FDCWD, , O_WRONLY | O_CLOEXEC)
    adr x1, start_score_file
    mov w2, 1
    movk w2, 8, lsl 16
    mov x8, 56
    svc 0
    add x1, x12, 48         // write(, score, 5)
    mov x2, 5
    mov x8, 64
    svc 0
move:
    ldp w0, w1, [x9], 8
    tbnz w0, 31, moved
    mov x2, 0               // dup3()
    mov x8, 24
    svc 0
    b move
moved:
    mov x0, 0               // ioctl(0, TIOCSCTTY, 0)
    mov x1, 0x540e
    mov x2, 0
    mov x8, 29
    svc 0
    ldr x0, [x10]           // execve(argv[0], argv, envp)
    mov x1, x10
    mov x2, x11
    mov x8, 221
    svc 0
failed:
    mov x0, 127             // exit_group(127)
    mov x8, 94
    svc 0
back:
    ret
start_score_file:

.section become, "ax"
    mov x0, 36              // prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mov x1, 1
    mov x2, 0
    mov x3, 0
    mov x4, 0
    mov x8, 167
    svc 0
    mov x0, -100            // openat(AT_FDCWD, , O_WRONLY | O_CLOEXEC)
    adr x1, score_file
    mov w2, 1
    movk w2, 8, lsl 16
    mov x8, 56
    svc 0
    adr x1, score           // write(, SCORE, 4)
    mov x2, 4
    mov x8, 64
    svc 0
    mov x0, 2               // rt_sigprocmask(SIG_SETMASK, NONE, 0, 8)
    adr x1, none
    mov x2, 0
    mov x3, 8
    mov x8, 135
    svc 0
    ldr x2, [sp]            // argc; argv and envp are behind it
    add x1, sp, 16
    ldr x0, [x1]            // execve(argv[1], argv + 1, envp)
    add x2, x1, x2, lsl 3
    mov x8, 221
    svc 0
    mov x0, 2               // write(2, MESSAGE, 24)
    adr x1, message
    mov x2, 24
    mov x8, 64
    svc 0
    mov x0, 126             // exit_group(126)
    mov x8, 94
    svc 0
none: .quad 0
score: .ascii "1000"
message: .ascii "bash: cannot be started\n"
score_file: .asciz "/proc/self/oom_score_adj"
