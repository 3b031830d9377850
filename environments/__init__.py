"""What is to be learned: the base environment, the agent loop, rewards, `process` and `evaluate`.

    from environments.hermes_base_env import HermesAgentBaseEnv     what an environment inherits
    from environments.config import HermesAgentEnvConfig            its settings
    from environments.servers import ServerConfig                   its model servers
    from environments.agent_loop import HermesAgentLoop             the loop on its own

Nothing is imported here: Atropos alone takes seconds, and a loop or a report can do without it.
"""
