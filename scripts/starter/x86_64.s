# The machine code in backends/executor/starter.py (`_CODE`), from which the tests assemble it again.
.intel_syntax noprefix

.section start, "ax"
    # rdi: moves, rsi: argv, rdx: envp, rcx: call. System calls overwrite rax, rcx and r11 only.
    mov r9, rdi
    mov r10, rcx
    mov r8, rsi
    mov rax, [r10]          # clone() or clone3()
    mov rdi, [r10 + 8]
    mov rsi, [r10 + 16]
    syscall
    test rax, rax
    jne back
    mov rbx, rdx            # of the new process alone
    mov rdi, [r10 + 24]     # write(tasks, "0", 1)
    lea rsi, [r10 + 32]
    mov edx, 1
    mov eax, 1
    syscall
    mov rdx, [r10 + 40]     # if (filter && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter)) exit
    test rdx, rdx
    je filtered
    mov edi, 22
    mov esi, 2
    mov eax, 157
    syscall
    test eax, eax
    jne failed
filtered:
    mov eax, 112            # setsid()
    syscall
    lea rdi, [rip + start_score_file]
    mov esi, 0x80001        # open(, O_WRONLY | O_CLOEXEC)
    mov eax, 2
    syscall
    mov edi, eax            # write(, score, 5)
    lea rsi, [r10 + 48]
    mov edx, 5
    mov eax, 1
    syscall
move:
    mov edi, [r9]
    mov esi, [r9 + 4]
    add r9, 8
    test edi, edi
    js moved
    mov eax, 33             # dup2()
    syscall
    jmp move
moved:
    xor edi, edi            # ioctl(0, TIOCSCTTY, 0)
    mov esi, 0x540e
    xor edx, edx
    mov eax, 16
    syscall
    mov rdi, [r8]           # execve(argv[0], argv, envp)
    mov rsi, r8
    mov rdx, rbx
    mov eax, 59
    syscall
failed:
    mov edi, 127            # exit_group(127)
    mov eax, 231
    syscall
back:
    ret
start_score_file:

.section become, "ax"
    mov edi, 36             # prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mov esi, 1
    xor edx, edx
    xor r10d, r10d
    xor r8d, r8d
    mov eax, 157
    syscall
    lea rdi, [rip + score_file]
    mov esi, 0x80001        # open(, O_WRONLY | O_CLOEXEC)
    mov eax, 2
    syscall
    mov edi, eax            # write(, SCORE, 4)
    lea rsi, [rip + score]
    mov edx, 4
    mov eax, 1
    syscall
    mov edi, 2              # rt_sigprocmask(SIG_SETMASK, NONE, 0, 8)
    lea rsi, [rip + none]
    xor edx, edx
    mov r10d, 8
    mov eax, 14
    syscall
    mov rax, [rsp]          # argc; argv and envp are behind it
    lea rsi, [rsp + 16]
    mov rdi, [rsi]          # execve(argv[1], argv + 1, envp)
    lea rdx, [rsi + rax * 8]
    mov eax, 59
    syscall
    mov edi, 2              # write(2, MESSAGE, 24)
    lea rsi, [rip + message]
    mov edx, 24
    mov eax, 1
    syscall
    mov edi, 126            # exit_group(126)
    mov eax, 231
    syscall
none: .quad 0
score: .ascii "1000"
message: .ascii "bash: cannot be started\n"
score_file: .asciz "/proc/self/oom_score_adj"
