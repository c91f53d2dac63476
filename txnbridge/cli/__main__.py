from txnbridge.cli import main

main(prog_name="txnbridge")
